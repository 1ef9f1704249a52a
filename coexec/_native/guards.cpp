#include "guards.h"

#include "bypass.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace coexec {

namespace {

PyObject* class_of(const py::object& tensor) { return reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())); }

void set_class(const py::object& tensor, const py::object& to) {
  static PyObject* const name = PyUnicode_InternFromString("__class__");
  if (PyObject_SetAttr(tensor.ptr(), name, to.ptr()) < 0) throw py::error_already_set();
}

}  // namespace

void Guards::guard(const py::sequence& tensors, const py::object& owner) {
  for (py::handle each : tensors) {
    auto tensor = py::reinterpret_borrow<py::object>(each);
    if (!take(tensor, owner)) continue;
    auto plain_class = py::reinterpret_borrow<py::object>(class_of(tensor));
    py::object waiting_class = classes_[plain_class];
    set_class(tensor, waiting_class);
    bool marked = mark(THPVariable_Unpack(tensor.ptr()));
    guarded_.push_back({tensor, std::move(plain_class), std::move(waiting_class), marked});
  }
}

void Guards::own(const py::sequence& tensors, const py::object& owner) {
  for (py::handle tensor : tensors) take(py::reinterpret_borrow<py::object>(tensor), owner);
}

bool Guards::take(const py::object& tensor, const py::object& owner) {
  auto id = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(tensor.ptr()));
  if (owners_.contains(id)) return false;
  owners_[id] = owner;
  owned_.push_back({tensor, std::move(id)});
  return true;
}

void Guards::lift() {
  for (Guarded& g : std::exchange(guarded_, {})) {
    if (class_of(g.tensor) == g.waiting_class.ptr()) set_class(g.tensor, g.plain_class);  // else it is the user's
    if (g.marked) unmark(THPVariable_Unpack(g.tensor.ptr()));
  }
}

void Guards::disown() {
  for (Owned& o : std::exchange(owned_, {})) {
    if (PyDict_DelItem(owners_.ptr(), o.id.ptr()) < 0) throw py::error_already_set();
  }
}

void bind_guards(py::module_& m) {
  py::class_<Guards>(m, "Guards")
      .def(py::init<py::dict, py::dict>())
      .def("guard", &Guards::guard)
      .def("own", &Guards::own)
      .def("lift", &Guards::lift)
      .def("disown", &Guards::disown);
}

}  // namespace coexec
