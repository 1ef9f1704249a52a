// The PythonRunner's hot path: answers the events that need no more than a comparison.
//
// `step` either answers a torch call, exactly as PythonRunner._event in Python would, or returns
// NotImplemented and has changed nothing. What is rare (fetches, backward passes, mismatches) is left
// to Python. The state of the iteration is Python's: both work on the same dictionaries and lists.
#pragma once
#include <pybind11/pybind11.h>

namespace coexec {
void bind_walker(pybind11::module_& m);
}
