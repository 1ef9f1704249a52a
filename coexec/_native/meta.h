// What Python may see of a tensor without looking at its values; see coexec.tracegraph.trace.TensorMeta.
#pragma once

#include "sizes.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace coexec {

struct Meta {
  std::vector<int64_t> shape, stride;
  int64_t offset;
  std::vector<Size> shape_sizes, stride_sizes;  // where sizes vary, instead of these
  Size offset_size;
  bool varies = false;
  at::ScalarType dtype;
  at::Device device = at::kCPU;
  bool requires_grad, is_leaf;
  pybind11::object python;  // the TensorMeta

  explicit Meta(const pybind11::dict& d);

  bool fits(const at::Tensor& tensor) const;
  bool fits_but_for_sizes(const at::Tensor& tensor) const;

  // A tensor that looks like this and has no memory; operations on it are caught by dispatch.
  at::Tensor hollow() const { return hollow(shape, stride, offset); }
  at::Tensor hollow(at::IntArrayRef shape, at::IntArrayRef stride, int64_t offset) const;
};

// NumPy may know the tensor's memory, and write to it between two calls.
bool is_exposed(const at::Tensor& tensor);

std::vector<Meta> metas_of(const pybind11::handle& list);

}  // namespace coexec
