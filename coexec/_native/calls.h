// Calls of Python compared with recorded ones; see coexec.tracegraph.calls, whose templates these read.
#pragma once

#include "sizes.h"
#include "slots.h"

#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace coexec {

struct NumberSlot {
  double value = 0;
  int64_t integer = 0;
  bool is_float = false;
  bool varies = false;
  uint32_t classes = 0;  // a bit for each class, see class_of
  Size size;             // where it varies, instead of all these
};

// What a call's arguments hold, in order.
struct Arguments {
  std::vector<PyObject*> tensors, numbers;
};

// Objects of Python that templates are made of.
struct Names {
  PyObject *new_tensor, *same_tensor, *container, *opaque, *tensor;
  Slot new_index, same_index, items, kind, value;
};

Names names_from(const pybind11::dict& names);

bool equal(PyObject* a, PyObject* b);

// Whether a call has the structure and attributes of a key that `calls.flatten` made.
bool match_call(PyObject* args, PyObject* kwargs, PyObject* key, const Names& names, Arguments& out);

NumberSlot number_slot(const pybind11::dict& d);
bool number_fits(PyObject* number, const NumberSlot& slot);

// A Python number after one of coexec.tracegraph.numbers.TRANSFORMS.
c10::IValue transformed(PyObject* number, const std::string& transform);

// The value that a template stands for, with the call's new tensors and its tensor arguments.
pybind11::object build(
    const pybind11::handle& result, c10::ArrayRef<pybind11::object> outputs,
    const std::vector<PyObject*>& arguments, const Names& names);

}  // namespace coexec
