// The tensors that a graph has captured, found again in each iteration.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <tuple>
#include <vector>

namespace coexec {

// Their tensors in the order of the graph, by address what the graph calls each of them, and those that are bound.
using FoundCaptures = std::tuple<pybind11::list, pybind11::dict, pybind11::list>;

// Holds the captured tensors by references that do not keep them alive.
class Captures {
 public:
  // `names` are what the graph calls them, `bound` the positions of those that the program cannot do without.
  Captures(const pybind11::tuple& references, pybind11::tuple names, std::vector<size_t> bound);

  // None where a bound one is gone.
  std::optional<FoundCaptures> find();

 private:
  void name(const pybind11::list& tensors);

  std::vector<pybind11::object> references_;
  pybind11::tuple names_;
  std::vector<size_t> bound_;
  std::vector<PyObject*> named_;  // not referred to: addresses, for which `by_address_` is right
  pybind11::dict by_address_;
};

void bind_captures(pybind11::module_& m);

}  // namespace coexec
