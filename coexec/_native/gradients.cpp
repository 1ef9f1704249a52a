#include "gradients.h"

#include "runner.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace coexec {

namespace {

py::object wrapped(const at::Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// Gives each tensor its gradient before that is computed. Returns what they had.
py::list announce_gradients(const py::list& tensors, const py::list& placeholders) {
  py::list before;
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& gradient = THPVariable_Unpack(tensors[i].ptr()).mutable_grad();
    before.append(wrapped(gradient));
    gradient = placeholders[i].is_none() ? at::Tensor() : THPVariable_Unpack(placeholders[i].ptr());
  }
  return before;
}

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) {
  auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  return at::Tensor(std::move(impl));
}

void PlainGradients::add(py::handle tensor, int64_t value_register, PyObject* placeholder) {
  all_.push_back({py::reinterpret_borrow<py::object>(tensor), value_register,
                  py::reinterpret_borrow<py::object>(placeholder), at::Tensor()});
}

void PlainGradients::announce() {
  for (Gradient& g : all_) {
    at::Tensor& gradient = THPVariable_Unpack(g.tensor.ptr()).mutable_grad();
    g.before = std::exchange(gradient, THPVariable_Unpack(g.placeholder.ptr()));
  }
}

void PlainGradients::take_back() {
  for (Gradient& g : all_) THPVariable_Unpack(g.tensor.ptr()).mutable_grad() = std::move(g.before);
}

py::list PlainGradients::publish(const Runner& runner) {
  py::list left;
  std::unordered_map<int64_t, at::Tensor> made;  // one object for each register, whichever tensors it is for
  for (Gradient& g : all_) {
    g.before.reset();
    if (g.placeholder && Py_REFCNT(g.placeholder.ptr()) > references_of_announced()) {
      left.append(py::make_tuple(g.tensor, g.value_register, g.placeholder));
      continue;
    }
    at::Tensor& gradient = made[g.value_register];
    if (!gradient.defined()) gradient = alias_of(runner.value(g.value_register).toTensor());
    THPVariable_Unpack(g.tensor.ptr()).mutable_grad() = gradient;
  }
  return left;
}

py::list PlainGradients::placeholders() const {
  py::list out;
  for (const Gradient& g : all_) out.append(g.placeholder);
  return out;
}

// How many references an announced placeholder has that nobody else refers to: some of them are PyTorch's.
Py_ssize_t PlainGradients::references_of_announced() {
  static const Py_ssize_t count = [] {
    PlainGradients sample;
    sample.add(wrapped(at::empty({0})), 0, wrapped(at::empty({0})).ptr());
    sample.announce();
    return Py_REFCNT(sample.all_[0].placeholder.ptr());
  }();
  return count;
}

void bind_gradients(py::module_& m) {
  py::class_<PlainGradients, std::shared_ptr<PlainGradients>>(m, "PlainGradients")
      .def("announce", &PlainGradients::announce)
      .def("take_back", &PlainGradients::take_back)
      .def("publish", &PlainGradients::publish)
      .def("placeholders", &PlainGradients::placeholders);
  m.def("alias_of", &alias_of);
  m.def("announce_gradients", &announce_gradients);
}

}  // namespace coexec
