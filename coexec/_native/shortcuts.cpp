#include "shortcuts.h"

#include "entry.h"
#include "pointer_map.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/python_torch_function_mode.h>

#include <array>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>

namespace py = pybind11;

namespace coexec {
namespace {

enum class Known { Nothing, Function, Never };

// One of PyTorch's C functions: of a method of tensors, a property of tensors, their `x[key]`, or a function. It lives as
// long as the process.
struct Shortcut {
  PyMethodDef* method = nullptr;
  PyCFunction called = nullptr;  // by the method
  PyGetSetDef* property = nullptr;
  getter read = nullptr;
  void* closure = nullptr;
  binaryfunc subscript = nullptr;
  PyObject* builtin = nullptr;
  Known known = Known::Nothing;
  PyObject* function = nullptr;  // what PyTorch hands to a mode
  bool passive = false;
};

// A method has no place for its shortcut: each has a C++ function of its own.
constexpr size_t kMost = 1024;
std::array<Shortcut*, kMost> methods{};
size_t method_count = 0;

PointerMap<Shortcut>& builtins() {
  static auto* instance = new PointerMap<Shortcut>();  // outlives the interpreter
  return *instance;
}

// A call whose way to a mode is watched. `self` is the tensor, but for a function; where there is one argument, `args` is
// that, and where there is none, nothing.
struct Watched {
  Shortcut& shortcut;
  PyObject *self, *args, *kwargs;
};
thread_local Watched* watched = nullptr;
thread_local PyObject* declined = nullptr;  // compared only

// Has a pointer in a place for the time of a block.
template <typename T>
class Set {
 public:
  Set(T*& place, T* value) : place_(place) { place = value; }
  ~Set() { place_ = nullptr; }

 private:
  T*& place_;
};

template <typename TLS>
bool skips_next() {
  if constexpr (requires { TLS::peek_skip_next(); }) {
    return TLS::peek_skip_next();
  } else {
    return false;  // before PyTorch 2.13
  }
}

// Who is to be asked first; null if PyTorch's way is to be taken.
Answering* who_answers() {
  return skips_next<at::impl::PythonTorchFunctionTLS>() ? nullptr : inmost_answering();
}

PyObject* original(const Shortcut& s, PyObject* self, PyObject* args, PyObject* kwargs) {
  if (s.property) return s.read(self, s.closure);
  if (s.subscript) return s.subscript(self, args);
  if (s.builtin) return PyCFunction_Type.tp_call(s.builtin, args, kwargs);
  if (s.method->ml_flags & METH_KEYWORDS) {
    return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void*>(s.called))(self, args, kwargs);
  }
  return s.called(self, args);
}

// Calls `visit` with each positional argument as a mode gets it, and its place.
template <typename Visit>
void each_argument(const Shortcut& s, PyObject* self, PyObject* args, const Visit& visit) {
  Py_ssize_t place = 0;
  if (!s.builtin) visit(place++, self);
  if (s.property || (s.method && s.method->ml_flags & METH_NOARGS)) return;
  if (s.subscript || (s.method && s.method->ml_flags & METH_O)) {
    visit(place, args);
    return;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) visit(place++, PyTuple_GET_ITEM(args, i));
}

Py_ssize_t count_of(const Shortcut& s, PyObject* self, PyObject* args) {
  Py_ssize_t count = 0;
  each_argument(s, self, args, [&](Py_ssize_t, PyObject*) { ++count; });
  return count;
}

PyObject* ask(const Shortcut& s, Answering& who, PyObject* self, PyObject* args, PyObject* kwargs) {
  try {
    py::tuple all(count_of(s, self, args));
    each_argument(s, self, args,
                  [&](Py_ssize_t i, PyObject* argument) { PyTuple_SET_ITEM(all.ptr(), i, Py_NewRef(argument)); });
    torch::overrides::StashTorchFunctionModeGuard others;
    return who.answer(s.function, all.ptr(), kwargs ? kwargs : Py_None).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* call(Shortcut& s, PyObject* self, PyObject* args, PyObject* kwargs) {
  Answering* who = s.known == Known::Never ? nullptr : who_answers();
  if (!who) return original(s, self, args, kwargs);
  if (s.known == Known::Nothing) {
    Watched call{s, self, args, kwargs};
    Set<Watched> here(watched, &call);
    return original(s, self, args, kwargs);
  }
  if (s.passive) {
    torch::overrides::StashTorchFunctionModeGuard others;
    return original(s, self, args, kwargs);
  }
  PyObject* answered = ask(s, *who, self, args, kwargs);
  if (answered != Py_NotImplemented) return answered;
  Py_DECREF(answered);
  Set<PyObject> once(declined, s.function);
  return original(s, self, args, kwargs);
}

template <size_t index>
PyObject* with_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
  return call(*methods[index], self, args, kwargs);
}

template <size_t index>
PyObject* without_keywords(PyObject* self, PyObject* args) {
  return call(*methods[index], self, args, nullptr);
}

Shortcut subscripts;

PyObject* subscript(PyObject* self, PyObject* key) { return call(subscripts, self, key, nullptr); }

PyObject* called_builtin(PyObject* function, PyObject* const* args, size_t count, PyObject* names) {
  Py_ssize_t positional = PyVectorcall_NARGS(count);
  auto all = py::reinterpret_steal<py::object>(PyTuple_New(positional));
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i < positional; ++i) PyTuple_SET_ITEM(all.ptr(), i, Py_NewRef(args[i]));
  py::object keywords;
  if (names && PyTuple_GET_SIZE(names) != 0) {
    keywords = py::reinterpret_steal<py::object>(PyDict_New());
    if (!keywords) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      if (PyDict_SetItem(keywords.ptr(), PyTuple_GET_ITEM(names, i), args[positional + i]) < 0) return nullptr;
    }
  }
  return call(*builtins().find(function), nullptr, all.ptr(), keywords.ptr());
}

PyObject* read(PyObject* self, void* closure) { return call(*static_cast<Shortcut*>(closure), self, nullptr, nullptr); }

template <size_t... index>
PyCFunction function_at(size_t wanted, bool keywords, std::index_sequence<index...>) {
  static constexpr std::array<PyCFunctionWithKeywords, sizeof...(index)> with{&with_keywords<index>...};
  static constexpr std::array<PyCFunction, sizeof...(index)> without{&without_keywords<index>...};
  return keywords ? reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(with[wanted])) : without[wanted];
}

// Whether this is the first time that it is asked for.
bool is_new(void* definition) {
  static auto* instance = new std::unordered_set<void*>();  // outlives the interpreter
  return instance->insert(definition).second;
}

void shorten(PyMethodDef* method) {
  int kind = method->ml_flags & ~METH_COEXIST;
  bool known = kind == METH_NOARGS || kind == METH_O || kind == METH_VARARGS || kind == (METH_VARARGS | METH_KEYWORDS);
  if (!known || method_count == kMost || !is_new(method)) return;
  methods[method_count] = new Shortcut{.method = method, .called = method->ml_meth};
  method->ml_meth = function_at(method_count++, kind & METH_KEYWORDS, std::make_index_sequence<kMost>());
}

// What sets a property gets the same closure, so it must not use it; PyTorch's have none.
void shorten(PyGetSetDef* property) {
  if (!property->get || (property->set && property->closure) || !is_new(property)) return;
  property->closure = new Shortcut{.property = property, .read = property->get, .closure = property->closure};
  property->get = &read;
}

// The C function of a built-in function must stay: it is what Python hashes.
void shorten(PyCFunctionObject* function) {
  int kind = function->m_ml->ml_flags & ~METH_STATIC;
  if (kind != (METH_VARARGS | METH_KEYWORDS) || function->vectorcall || !is_new(function)) return;
  auto* object = Py_NewRef(reinterpret_cast<PyObject*>(function));
  builtins().insert(object, new Shortcut{.builtin = object});
  function->vectorcall = &called_builtin;
}

// Types have the C function of `x[key]` from the type that defines it, unless they define another one.
void shorten(PyWrapperDescrObject* wrapper) {
  if (std::strcmp(wrapper->d_base->name, "__getitem__") != 0) return;
  auto original = reinterpret_cast<binaryfunc>(wrapper->d_wrapped);
  for (PyObject* cls : {THPVariableClass, ParameterClass}) {
    PyMappingMethods* methods = reinterpret_cast<PyTypeObject*>(cls)->tp_as_mapping;
    if (methods->mp_subscript != original) continue;
    subscripts.subscript = original;
    methods->mp_subscript = &subscript;
  }
}

bool is_property(PyObject* object) { return Py_TYPE(object) == &PyGetSetDescr_Type; }

void shorten(const py::handle& function) {
  PyObject* object = function.ptr();
  if (Py_TYPE(object) == &PyMethodDescr_Type) {
    shorten(reinterpret_cast<PyMethodDescrObject*>(object)->d_method);
  } else if (PyCFunction_CheckExact(object)) {
    shorten(reinterpret_cast<PyCFunctionObject*>(object));
  } else if (is_property(object)) {
    shorten(reinterpret_cast<PyGetSetDescrObject*>(object)->d_getset);
  } else if (Py_TYPE(object) == &PyWrapperDescr_Type) {
    shorten(reinterpret_cast<PyWrapperDescrObject*>(object));
  }
}

std::string name_of(const py::handle& object) { return py::getattr(object, "__name__", py::str()).cast<std::string>(); }

// Whether PyTorch's own name of an operator is that of a function: `__add__`, `__radd__` and `__iadd__` are `add`.
bool is_operator(std::string name, std::string function) {
  if (name.size() < 5 || name.substr(0, 2) != "__") return false;
  name = name.substr(2, name.size() - 4);
  if (!function.empty() && function.back() == '_') function.pop_back();
  return name == function || (name[0] == 'r' || name[0] == 'i' ? name.substr(1) == function : false);
}

// Whether a mode is called with the function that the C function is behind.
bool is_behind(const Shortcut& s, PyObject* function) {
  if (s.property) {
    py::object self = py::getattr(function, "__self__", py::none());
    return is_property(self.ptr()) && reinterpret_cast<PyGetSetDescrObject*>(self.ptr())->d_getset == s.property &&
           name_of(function) == "__get__";
  }
  if (s.builtin) return function == s.builtin;
  if (s.subscript) {
    return Py_TYPE(function) == &PyWrapperDescr_Type &&
           reinterpret_cast<PyWrapperDescrObject*>(function)->d_wrapped == reinterpret_cast<void*>(s.subscript);
  }
  return Py_TYPE(function) == &PyMethodDescr_Type &&
         (reinterpret_cast<PyMethodDescrObject*>(function)->d_method == s.method ||
          is_operator(s.method->ml_name, name_of(function)));
}

bool has_arguments(const Watched& call, PyObject* args, PyObject* kwargs) {
  if (PyTuple_GET_SIZE(args) != count_of(call.shortcut, call.self, call.args)) return false;
  bool same = true;
  each_argument(call.shortcut, call.self, call.args,
                [&](Py_ssize_t i, PyObject* argument) { same &= PyTuple_GET_ITEM(args, i) == argument; });
  auto size = [](PyObject* dict) { return dict && dict != Py_None ? PyDict_GET_SIZE(dict) : 0; };
  return same && (kwargs == call.kwargs || (size(kwargs) == 0 && size(call.kwargs) == 0));
}

}  // namespace

void mode_reached(const Answering* answering, PyObject* function, PyObject* args, PyObject* kwargs) {
  if (!watched || !answering) return;
  const Watched& call = *std::exchange(watched, nullptr);
  Shortcut& s = call.shortcut;
  bool as_expected = is_behind(s, function) && has_arguments(call, args, kwargs);
  s.known = as_expected ? Known::Function : Known::Never;
  if (!as_expected) return;
  s.function = Py_NewRef(function);
  s.passive = answering->is_passive(function);
}

bool was_declined(PyObject* function) { return declined && std::exchange(declined, nullptr) == function; }

void bind_shortcuts(py::module_& m) {
  m.def("shorten", [](const py::iterable& functions) {
    for (const py::handle& function : functions) shorten(function);
  }, "Lets calls of these functions, methods and properties reach a mode that answers natively at once.");
}

}  // namespace coexec
