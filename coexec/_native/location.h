// Executed locations: the chain of call sites from the tape's block down to the operation.
#pragma once
#include <pybind11/pybind11.h>

namespace coexec {
void bind_location(pybind11::module_& m);
}
