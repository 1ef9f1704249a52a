// The `__torch_function__` of a function mode, entered through C++ whoever answers.
#pragma once

#include <pybind11/pybind11.h>

namespace coexec {

// Answers torch calls of a mode.
class Answering {
 public:
  virtual ~Answering() = default;

  // What the call returns; NotImplemented, with nothing changed, where Python has to answer.
  virtual pybind11::object answer(PyObject* function, PyObject* args, PyObject* kwargs) = 0;

  // Whether it does nothing but call the function, whatever the arguments are.
  virtual bool is_passive(PyObject* function) const = 0;
};

// Who answers the calls of the inmost function mode; null if that is none of ours, or Python does.
Answering* inmost_answering();

void bind_entry(pybind11::module_& m);

}  // namespace coexec
