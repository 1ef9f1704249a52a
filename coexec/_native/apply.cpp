#include "apply.h"

namespace py = pybind11;

namespace coexec {
namespace {

// The entry of PyTorch's table of methods. What Python has got from a function, as in `linear = Linear.apply`,
// refers to it.
PyMethodDef* method = nullptr;

PyCFunctionWithKeywords original = nullptr;

// What is called in the place of the original, with the function and its arguments.
PyObject* stand_in = nullptr;

PyObject* watched(PyObject* function, PyObject* args, PyObject* kwargs) {
  if (!stand_in) return original(function, args, kwargs);
  try {
    py::tuple all = py::make_tuple(py::handle(function)) + py::reinterpret_borrow<py::tuple>(args);
    auto callee = py::reinterpret_borrow<py::object>(stand_in);
    return PyObject_Call(callee.ptr(), all.ptr(), kwargs);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyCFunction as_entry(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// The entry, if it is of the kind that is known; null otherwise.
PyMethodDef* find() {
  py::object base = py::module_::import("torch._C").attr("_FunctionBase");
  py::object found = base.attr("__dict__")["apply"];
  if (!Py_IS_TYPE(found.ptr(), &PyClassMethodDescr_Type)) return nullptr;
  PyMethodDef* entry = reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
  return entry->ml_flags == (METH_CLASS | METH_VARARGS | METH_KEYWORDS) ? entry : nullptr;
}

}  // namespace

void bind_apply(py::module_& m) {
  method = find();
  if (!method) return;
  original = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(method->ml_meth));
  // The caller keeps `next` alive; None ends it.
  m.def("watch_apply", [](const py::object& next) {
    stand_in = next.is_none() ? nullptr : next.ptr();
    method->ml_meth = as_entry(stand_in ? &watched : original);
  });
  m.def("apply", [](const py::object& function, const py::args& args, const py::kwargs& kwargs) {
    PyObject* returned = original(function.ptr(), args.ptr(), kwargs.empty() ? nullptr : kwargs.ptr());
    if (!returned) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(returned);
  });
}

}  // namespace coexec
