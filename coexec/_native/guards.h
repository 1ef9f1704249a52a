// The tensors of an iteration that Python has left, and that is not finished: their use waits.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace coexec {

class Guards {
 public:
  // `owners` has for each such tensor of any iteration, by its id, whose it is; `classes` those that wait.
  Guards(pybind11::dict owners, pybind11::dict classes) : owners_(std::move(owners)), classes_(std::move(classes)) {}

  // Makes the use of these tensors wait for `owner`, but of those that wait for somebody already.
  void guard(const pybind11::sequence& tensors, const pybind11::object& owner);

  // Says that these are the owner's, too; nobody gets at them without using others.
  void own(const pybind11::sequence& tensors, const pybind11::object& owner);

  // Lets tensors be used as before: the owner sees to it that whoever uses one waits.
  void lift();

  // Says that none is the owner's any more.
  void disown();

 private:
  struct Guarded {
    pybind11::object tensor, plain_class, waiting_class;
    bool marked;
  };

  bool take(const pybind11::object& tensor, const pybind11::object& owner);

  pybind11::dict owners_, classes_;
  std::vector<Guarded> guarded_;
  struct Owned {
    pybind11::object tensor, id;
  };
  std::vector<Owned> owned_;
};

void bind_guards(pybind11::module_& m);

}  // namespace coexec
