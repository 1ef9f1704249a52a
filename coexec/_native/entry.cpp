#include "entry.h"

#include "shortcuts.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/python_torch_function_mode.h>

#include <cstring>
#include <memory>
#include <vector>

namespace py = pybind11;

namespace coexec {
namespace {

struct Entry {
  PyObject* mode;                  // PyTorch wants it to be `self` of its `__torch_function__`
  py::object python;               // answers what nobody else does
  py::object method;               // its `__torch_function__`
  Answering* answering = nullptr;  // kept alive by the mode
};

// Of the modes that are entered now: a few.
std::vector<std::unique_ptr<Entry>>& entries() {
  static auto* instance = new std::vector<std::unique_ptr<Entry>>();  // outlives the interpreter
  return *instance;
}

Entry* find(PyObject* mode) {
  for (const auto& entry : entries()) {
    if (entry->mode == mode) return entry.get();
  }
  return nullptr;
}

Entry& entry_of(PyObject* mode) {
  if (Entry* entry = find(mode)) return *entry;
  throw std::out_of_range("the mode is not attached");
}

py::object answer(PyObject* mode, PyObject* function, PyObject* types, PyObject* args, PyObject* kwargs) {
  Entry& entry = entry_of(mode);
  mode_reached(entry.answering, function, args, kwargs);
  if (entry.answering && !was_declined(function)) {
    py::object answered = entry.answering->answer(function, args, kwargs);
    if (answered.ptr() != Py_NotImplemented) return answered;
  }
  py::object python = entry.python;  // the entry may be gone when it returns
  PyObject* answered = PyObject_CallFunctionObjArgs(python.ptr(), function, types, args, kwargs, nullptr);
  if (!answered) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(answered);
}

// mode.__torch_function__(function, types, args[, kwargs])
PyObject* torch_function(PyObject* mode, PyObject* const* args, Py_ssize_t count) {
  if (count < 3 || count > 4 || !PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "it takes a function, types, a tuple of arguments, and keywords or None");
    return nullptr;
  }
  try {
    return answer(mode, args[0], args[1], args[2], count == 4 ? args[3] : Py_None).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// What C code gets of a mode by name. PyTorch asks for this method twice in each call, and without this Python
// would make a string of the name and look for it in all base classes.
PyObject* get_attribute(PyObject* mode, char* name) {
  if (std::strcmp(name, "__torch_function__") == 0) {
    if (const Entry* entry = find(mode)) return Py_NewRef(entry->method.ptr());
  }
  PyObject* string = PyUnicode_FromString(name);
  if (!string) return nullptr;
  PyObject* found = Py_TYPE(mode)->tp_getattro(mode, string);
  Py_DECREF(string);
  return found;
}

void detach(const py::object& mode) {
  std::erase_if(entries(), [&](const auto& entry) { return entry->mode == mode.ptr(); });
}

py::object attach(const py::object& mode, py::object python) {
  static PyMethodDef definition{"__torch_function__",
                                reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&torch_function)),
                                METH_FASTCALL, "Answers a torch call, or hands it to Python."};
  auto method = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, mode.ptr()));
  if (!method) throw py::error_already_set();
  Entry made{mode.ptr(), std::move(python), method};
  if (Entry* entry = find(mode.ptr())) {
    *entry = std::move(made);
  } else {
    entries().push_back(std::make_unique<Entry>(std::move(made)));
  }
  if (!Py_TYPE(mode.ptr())->tp_getattr) Py_TYPE(mode.ptr())->tp_getattr = &get_attribute;
  return method;
}

// Of the function mode that the next call goes to; null if that is none of ours.
Entry* own_entry() {
  if (!at::impl::torch_function_mode_enabled()) return nullptr;
  int64_t inmost = at::impl::PythonTorchFunctionTLS::stack_len() - 1;
  return find(at::impl::PythonTorchFunctionTLS::get_stack_at(inmost)->ptr(getPyInterpreter()));
}

}  // namespace

Answering* inmost_answering() {
  Entry* entry = own_entry();
  return entry ? entry->answering : nullptr;
}

namespace {

// handle_torch_function(function, relevant arguments, *args, **kwargs)
PyObject* handle_torch_function(PyObject* original, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Entry* entry = count < 2 ? nullptr : own_entry();
  if (!entry) return PyObject_Vectorcall(original, args, count, names);
  try {
    py::tuple positional(count - 2);
    for (Py_ssize_t i = 2; i < count; ++i) PyTuple_SET_ITEM(positional.ptr(), i - 2, Py_NewRef(args[i]));
    py::object keywords = py::none();
    if (names) {
      keywords = py::dict();
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
        if (PyDict_SetItem(keywords.ptr(), PyTuple_GET_ITEM(names, i), args[count + i]) < 0) return nullptr;
      }
    }
    torch::overrides::StashTorchFunctionModeGuard others;
    // None of our modes looks at the types.
    py::object answered = answer(entry->mode, args[0], py::tuple().ptr(), positional.ptr(), keywords.ptr());
    if (answered.ptr() != Py_NotImplemented) return answered.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  // The original tries other implementations, or says that there is none.
  auto state = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  PyObject* returned = PyObject_Vectorcall(original, args, count, names);
  at::impl::PythonTorchFunctionTLS::set_disabled_state(state);
  return returned;
}

py::object handler(const py::object& original) {
  static PyMethodDef definition{"handle_torch_function",
                                reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&handle_torch_function)),
                                METH_FASTCALL | METH_KEYWORDS, "torch.overrides.handle_torch_function"};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, original.ptr()));
}

}  // namespace

void bind_entry(py::module_& m) {
  py::class_<Answering>(m, "Answering");
  m.def("attach", &attach, "A `__torch_function__` for a mode, which `python` answers.");
  m.def("handler", &handler, "A `handle_torch_function` that calls attached modes at once, and is the original for others.");
  m.def("lead", [](const py::object& mode, Answering* answering) { entry_of(mode.ptr()).answering = answering; },
        py::arg("mode"), py::arg("answering").none(true), "Lets somebody answer before Python does, or nobody.");
  m.def("detach", &detach);
}

}  // namespace coexec
