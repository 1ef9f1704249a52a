#include "meta.h"

#include <ATen/Functions.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace coexec {

Meta::Meta(const py::dict& d)
    : shape(d["shape"].cast<std::vector<int64_t>>()),
      stride(d["stride"].cast<std::vector<int64_t>>()),
      offset(d["offset"].cast<int64_t>()),
      dtype(py::cast<at::ScalarType>(d["dtype"])),
      device(py::cast<at::Device>(d["device"])),
      requires_grad(d["requires_grad"].cast<bool>()),
      is_leaf(d["is_leaf"].cast<bool>()),
      python(d["meta"]) {}

bool Meta::fits(const at::Tensor& tensor) const {
  return tensor.layout() == at::kStrided && tensor.scalar_type() == dtype &&
         tensor.sizes() == at::IntArrayRef(shape) && tensor.strides() == at::IntArrayRef(stride) &&
         tensor.device() == device && tensor.requires_grad() == requires_grad && tensor.is_leaf() == is_leaf;
}

at::Tensor Meta::hollow() const {
  auto options = at::TensorOptions(dtype).device(device);
  at::Tensor tensor = at::for_blob(nullptr, shape)
                          .strides(stride)
                          .storage_offset(offset)
                          .context(nullptr, [](void*) {})
                          .target_device(device)
                          .options(options)
                          .allocator(c10::GetAllocator(c10::kMeta))
                          .resizeable_storage()
                          .make_tensor();
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
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
