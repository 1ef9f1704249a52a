// What Python may see of a tensor without looking at its values; see coexec.tracegraph.trace.TensorMeta.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace coexec {

struct Meta {
  std::vector<int64_t> shape, stride;
  int64_t offset;
  at::ScalarType dtype;
  at::Device device = at::kCPU;
  bool requires_grad, is_leaf;
  pybind11::object python;  // the TensorMeta

  explicit Meta(const pybind11::dict& d);

  bool fits(const at::Tensor& tensor) const;

  // A tensor that looks like this and has no memory; operations on it are caught by dispatch.
  at::Tensor hollow() const;
};

// NumPy may know the tensor's memory, and write to it between two calls.
bool is_exposed(const at::Tensor& tensor);

std::vector<Meta> metas_of(const pybind11::handle& list);

}  // namespace coexec
