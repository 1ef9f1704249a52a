#include "meta.h"

#include "bypass.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace coexec {

Meta::Meta(const py::dict& d)
    : shape_sizes(sizes_of(d["shape"])),
      stride_sizes(sizes_of(d["stride"])),
      offset_size(size_of(d["offset"])),
      varies(vary(shape_sizes) || vary(stride_sizes) || offset_size.varies()),
      dtype(py::cast<at::ScalarType>(d["dtype"])),
      device(py::cast<at::Device>(d["device"])),
      requires_grad(d["requires_grad"].cast<bool>()),
      is_leaf(d["is_leaf"].cast<bool>()),
      python(d["meta"]) {
  auto none = [](int64_t) -> std::optional<int64_t> { return 0; };
  shape = *values_of(shape_sizes, none);
  stride = *values_of(stride_sizes, none);
  offset = offset_size.constant;
}

bool Meta::fits(const at::Tensor& tensor) const {
  return fits_but_for_sizes(tensor) && tensor.sizes() == at::IntArrayRef(shape) &&
         tensor.strides() == at::IntArrayRef(stride);
}

bool Meta::fits_but_for_sizes(const at::Tensor& tensor) const {
  // Nested tensors, whose layout is strided, have no sizes.
  return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.scalar_type() == dtype &&
         tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.device() == device && tensor.requires_grad() == requires_grad && tensor.is_leaf() == is_leaf;
}

at::Tensor Meta::hollow(at::IntArrayRef shape, at::IntArrayRef stride, int64_t offset) const {
  auto type = c10::scalarTypeToTypeMeta(dtype);
  size_t bytes = at::detail::computeStorageNbytes(shape, stride, type.itemsize(), offset);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), c10::GetAllocator(c10::kMeta),
      /*resizable=*/true);
  storage.unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(at::TensorOptions(dtype).device(device).computeDispatchKey()), type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape, stride, offset);
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  mark(tensor);
  if (requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

bool is_exposed(const at::Tensor& tensor) { return tensor.is_cpu() && !tensor.storage().resizable(); }

std::vector<Meta> metas_of(const py::handle& list) {
  std::vector<Meta> out;
  for (const auto& d : list.cast<py::list>()) out.emplace_back(d.cast<py::dict>());
  return out;
}

}  // namespace coexec
