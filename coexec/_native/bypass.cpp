#include "bypass.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <optional>

namespace py = pybind11;

namespace coexec {
namespace {

// Above autograd, autocast and transforms, and used by nothing else outside of PyTorch's own tests.
constexpr auto kWithoutValue = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Gives what C++ code should have in the place of a tensor: what a placeholder has become; waits for pending writes.
PyObject* current = nullptr;

// Of this thread, while it is in a block with placeholders: called with the operation's name and a tensor, gives it a
// value where it is a placeholder.
thread_local PyObject* handler = nullptr;

struct Keys : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl& tensor) { return tensor.*(&Keys::key_set_); }
};

bool is_marked(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kWithoutValue); }

at::Tensor replaced(const at::Tensor& tensor, const std::string& name) {
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  object = py::handle(current)(object);
  if (handler) py::reinterpret_borrow<py::object>(handler)(name, object);
  return object.cast<at::Tensor>();
}

// Replaces what is marked in an argument; whether something still is.
bool replace(c10::IValue& value, const std::string& name) {
  if (value.isTensor()) {
    if (is_marked(value.toTensor())) value = replaced(value.toTensor(), name);
    return is_marked(value.toTensor());
  }
  bool left = false;
  if (value.isList()) {
    c10::List<c10::IValue> list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      c10::IValue element = list.get(i);
      left |= replace(element, name);
      list.set(i, element);
    }
    value = list;
  }
  return left;
}

void seen(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool left = false;
  {
    py::gil_scoped_acquire gil;
    std::string name = toString(op.operator_name());
    size_t count = op.schema().arguments().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i) left |= replace((*stack)[i], name);
  }
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard;
  if (left) guard.emplace(kWithoutValue);  // an error of what is below
  op.callBoxed(*stack);
}

}  // namespace

bool mark(const at::Tensor& tensor) {
  if (is_marked(tensor)) return false;
  c10::DispatchKeySet& keys = Keys::of(*tensor.unsafeGetTensorImpl());
  keys = keys.add(kWithoutValue);
  return true;
}

void unmark(const at::Tensor& tensor) {
  c10::DispatchKeySet& keys = Keys::of(*tensor.unsafeGetTensorImpl());
  keys = keys.remove(kWithoutValue);
}

void let_pass() { c10::impl::tls_set_dispatch_key_excluded(kWithoutValue, true); }

void bind_bypass(py::module_& m) {
  m.def("set_current", [](py::object function) { current = function.release().ptr(); });
  m.def("mark", &mark);
  m.def("is_marked", &is_marked);
  m.def("unmark", &unmark);
  // Returns the handler before; the caller keeps both alive.
  m.def("handle_bypassed", [](const py::object& next) {
    py::object before = handler ? py::reinterpret_borrow<py::object>(handler) : py::none();
    handler = next.is_none() ? nullptr : next.ptr();
    return before;
  });
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&seen>());
}

}  // namespace coexec
