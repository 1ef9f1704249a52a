// Executed locations: the chain of call sites from the tape's block down to the operation.
#pragma once
#include <pybind11/pybind11.h>

namespace coexec {

// The location of the running Python code: without its `skip` innermost frames, up to frame `outermost`.
int64_t locate(int skip, PyObject* outermost);

void bind_location(pybind11::module_& m);

}  // namespace coexec
