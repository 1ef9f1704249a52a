#include "captures.h"

#include <pybind11/stl.h>

#include <algorithm>

namespace py = pybind11;

namespace coexec {

namespace {

// What a weak reference refers to, or None.
py::object referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw py::error_already_set();
  return found ? py::reinterpret_steal<py::object>(found) : py::none();
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(reference));
#endif
}

}  // namespace

Captures::Captures(const py::tuple& references, py::tuple names, std::vector<size_t> bound)
    : names_(std::move(names)), bound_(std::move(bound)) {
  for (py::handle reference : references) references_.push_back(py::reinterpret_borrow<py::object>(reference));
}

std::optional<FoundCaptures> Captures::find() {
  py::list tensors(references_.size());
  for (size_t i = 0; i < references_.size(); ++i) {
    PyObject* reference = references_[i].ptr();
    py::object tensor = PyWeakref_Check(reference) ? referent(reference) : py::none();
    PyList_SET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i), tensor.release().ptr());
  }
  py::list bound;
  for (size_t i : bound_) {
    if (tensors[i].is_none()) return std::nullopt;
    bound.append(tensors[i]);
  }
  bool known = named_.size() == references_.size() &&
               std::equal(named_.begin(), named_.end(), reinterpret_cast<PyListObject*>(tensors.ptr())->ob_item);
  if (!known) name(tensors);
  return FoundCaptures(
      std::move(tensors), py::reinterpret_steal<py::dict>(PyDict_Copy(by_address_.ptr())), std::move(bound));
}

void Captures::name(const py::list& tensors) {
  named_.clear();
  by_address_ = py::dict();
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    named_.push_back(tensor);
    if (tensor != Py_None) by_address_[py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(tensor))] = names_[i];
  }
}

void bind_captures(py::module_& m) {
  py::class_<Captures>(m, "Captures")
      .def(py::init<const py::tuple&, py::tuple, std::vector<size_t>>())
      .def("find", &Captures::find);
}

}  // namespace coexec
