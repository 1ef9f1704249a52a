// What becomes the `.grad` of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace coexec {

class Runner;

// A new tensor on the memory of another, without autograd history.
at::Tensor alias_of(const at::Tensor& tensor);

// Gradients that are registers of the GraphRunner as they are: Python has no part in handing them over, unless it
// has got hold of their placeholders.
class PlainGradients {
 public:
  // `placeholder` is what stands for it, if Python may have got that.
  void add(pybind11::handle tensor, int64_t value_register, PyObject* placeholder);

  // Gives each tensor its placeholder, before the gradient is computed; `take_back` gives it back what it had.
  void announce();
  void take_back();

  // Gives each tensor its gradient. Returns what is left to Python: tensors, registers and placeholders that
  // somebody holds, or that are the gradients of several.
  pybind11::list publish(const Runner& runner);

  pybind11::list placeholders() const;

 private:
  struct Gradient {
    pybind11::object tensor;
    int64_t value_register;
    pybind11::object placeholder;  // or null
    at::Tensor before;
  };

  static Py_ssize_t references_of_announced();

  std::vector<Gradient> all_;
};

void bind_gradients(pybind11::module_& m);

}  // namespace coexec
