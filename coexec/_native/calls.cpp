#include "calls.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

namespace py = pybind11;

namespace coexec {

namespace {

// The classes of coexec.tracegraph.calls.number_class as bits of a set.
constexpr double kSpecial[] = {0, 1, -1, 2, -2, 0.5, INFINITY, -INFINITY};
constexpr int kSpecials = 8;

int class_of(double value) {
  if (std::isnan(value)) return kSpecials + 2;
  for (int i = 0; i < kSpecials; ++i) {
    if (value == kSpecial[i]) return i;
  }
  return value > 0 ? kSpecials : kSpecials + 1;
}

// Walks a value along the key that `calls.flatten` made of another one.
bool match(PyObject* value, PyObject* key, const Names& names, Arguments& out) {
  if (key == names.tensor) {
    if (!THPVariable_Check(value)) return false;
    out.tensors.push_back(value);
    return true;
  }
  if (PyType_Check(key)) {  // the type of a number
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != key) return false;
    out.numbers.push_back(value);
    return true;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(key)) == names.opaque) {
    return names.value.get(key) == value;
  }
  if (!PyTuple_CheckExact(key)) return !THPVariable_Check(value) && equal(value, key);
  PyObject* kind = PyTuple_GET_ITEM(key, 0);
  PyObject* items = PyTuple_GET_ITEM(key, 1);
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != kind) return false;
  if (PyTuple_Check(value) || PyList_Check(value)) {
    Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
    if (PyTuple_GET_SIZE(items) != n) return false;
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (!match(PySequence_Fast_GET_ITEM(value, i), PyTuple_GET_ITEM(items, i), names, out)) return false;
    }
    return true;
  }
  if (PySlice_Check(value)) {
    auto* slice = reinterpret_cast<PySliceObject*>(value);
    return match(slice->start, PyTuple_GET_ITEM(items, 0), names, out) &&
           match(slice->stop, PyTuple_GET_ITEM(items, 1), names, out) &&
           match(slice->step, PyTuple_GET_ITEM(items, 2), names, out);
  }
  return false;  // dictionaries and the like are left to Python
}

}  // namespace

bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  int r = PyObject_RichCompareBool(a, b, Py_EQ);
  if (r < 0) throw py::error_already_set();
  return r == 1;
}

bool match_call(PyObject* args, PyObject* kwargs, PyObject* key, const Names& names, Arguments& out) {
  PyObject* positional = PyTuple_GET_ITEM(key, 0);
  PyObject* keywords = PyTuple_GET_ITEM(key, 1);
  Py_ssize_t n = PyTuple_GET_SIZE(args);
  Py_ssize_t named = kwargs && kwargs != Py_None ? PyDict_GET_SIZE(kwargs) : 0;
  if (PyTuple_GET_SIZE(positional) != n || PyTuple_GET_SIZE(keywords) != named) return false;
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (!match(PyTuple_GET_ITEM(args, i), PyTuple_GET_ITEM(positional, i), names, out)) return false;
  }
  if (named == 0) return true;
  Py_ssize_t position = 0, i = 0;
  PyObject *name, *value;
  while (PyDict_Next(kwargs, &position, &name, &value)) {
    PyObject* pair = PyTuple_GET_ITEM(keywords, i++);
    if (!equal(name, PyTuple_GET_ITEM(pair, 0))) return false;
    if (!match(value, PyTuple_GET_ITEM(pair, 1), names, out)) return false;
  }
  return true;
}

bool number_fits(PyObject* number, const NumberSlot& slot) {
  if (PyFloat_CheckExact(number)) {
    double v = PyFloat_AS_DOUBLE(number);
    if (!slot.is_float) return false;
    if (slot.varies) return slot.classes >> class_of(v) & 1;
    return (v == slot.value && std::signbit(v) == std::signbit(slot.value)) ||
           (std::isnan(v) && std::isnan(slot.value));
  }
  if (!PyLong_CheckExact(number) || slot.is_float) return false;
  int overflow = 0;
  int64_t v = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow) return false;
  return slot.varies ? slot.classes >> class_of(static_cast<double>(v)) & 1 : v == slot.integer;
}

NumberSlot number_slot(const py::dict& d) {
  NumberSlot slot;
  if (py::isinstance<py::tuple>(d["value"])) {
    slot.size = size_of(d["value"]);
    return slot;
  }
  slot.is_float = PyFloat_Check(d["value"].ptr());
  slot.value = d["value"].cast<double>();
  if (!slot.is_float) slot.integer = d["value"].cast<int64_t>();
  slot.varies = d["varies"].cast<bool>();
  for (double example : d["examples"].cast<std::vector<double>>()) slot.classes |= 1u << class_of(example);
  return slot;
}

c10::IValue transformed(PyObject* number, const std::string& transform) {
  if (PyLong_CheckExact(number)) {
    int64_t v = PyLong_AsLongLong(number);
    if (transform == "x") return v;
    if (transform == "-x") return -v;
    if (transform == "1 - x") return 1 - v;
    return transform == "1 / x" ? (v ? 1.0 / static_cast<double>(v) : NAN) : static_cast<double>(v);
  }
  double v = PyFloat_AS_DOUBLE(number);
  if (transform == "-x") return -v;
  if (transform == "1 - x") return 1 - v;
  if (transform == "1 / x") return v != 0 ? 1 / v : NAN;
  return v;
}

py::object build(
    const py::handle& result, c10::ArrayRef<py::object> outputs, const std::vector<PyObject*>& arguments,
    const Names& names) {
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(result.ptr()));
  if (kind == names.new_tensor) return outputs[PyLong_AsSsize_t(names.new_index.get(result.ptr()))];
  if (kind == names.same_tensor) {
    return py::reinterpret_borrow<py::object>(arguments[PyLong_AsSsize_t(names.same_index.get(result.ptr()))]);
  }
  if (kind != names.container) return py::reinterpret_borrow<py::object>(result);
  auto items = py::reinterpret_borrow<py::tuple>(names.items.get(result.ptr()));
  py::list built;
  for (const auto& item : items) built.append(build(item, outputs, arguments, names));
  auto container = py::reinterpret_borrow<py::object>(names.kind.get(result.ptr()));
  if (container.is(py::type::of(built))) return built;
  return container.is(py::type::of(items)) ? py::object(py::tuple(built)) : container(built);
}

Names names_from(const py::dict& d) {
  Names n;
  n.new_tensor = d["NewTensor"].ptr();
  n.same_tensor = d["SameTensor"].ptr();
  n.container = d["Container"].ptr();
  n.opaque = d["Opaque"].ptr();
  n.tensor = d["Tensor"].ptr();
  n.new_index = Slot(d["NewTensor"], "index");
  n.same_index = Slot(d["SameTensor"], "index");
  n.items = Slot(d["Container"], "items");
  n.kind = Slot(d["Container"], "kind");
  n.value = Slot(d["Opaque"], "value");
  return n;
}

}  // namespace coexec
