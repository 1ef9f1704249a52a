// Instances of Python classes with `__slots__`, made and read without calling Python.
#pragma once

#include <pybind11/pybind11.h>

#include <structmember.h>

#include <string>

namespace coexec {

// Where instances of a class keep one of their slots.
class Slot {
 public:
  Slot() = default;

  Slot(const pybind11::handle& cls, const char* name) {
    pybind11::object descriptor = cls.attr(name);
    if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type) {
      throw std::runtime_error(std::string(name) + " is no slot");
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
  }

  PyObject* get(PyObject* instance) const { return *at(instance); }

  // A new reference takes the place of the old one.
  void set(PyObject* instance, PyObject* value) const {
    PyObject* old = get(instance);
    *at(instance) = Py_NewRef(value);
    Py_XDECREF(old);
  }

 private:
  PyObject** at(PyObject* instance) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(instance) + offset_);
  }

  Py_ssize_t offset_ = 0;
};

// Hides an object from the cyclic garbage collector, which would visit it again and again: for objects that
// are part of no cycle, or of one that is broken by hand.
inline void untrack(PyObject* object) {
  if (PyObject_IS_GC(object) && PyObject_GC_IsTracked(object)) PyObject_GC_UnTrack(object);
}

// An instance with all slots unset, hidden from the garbage collector.
inline pybind11::object make_instance(PyObject* cls) {
  auto* type = reinterpret_cast<PyTypeObject*>(cls);
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) throw pybind11::error_already_set();
  untrack(made);
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

}  // namespace coexec
