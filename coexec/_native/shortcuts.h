// Torch calls that reach a mode of ours on a shorter way than PyTorch's.
//
// PyTorch parses the arguments of a call, looks for the function by its name, and calls the mode as Python would. That
// takes longer than answering. So the C functions behind some of PyTorch's functions, methods and properties have a
// function of ours before them. Where a mode of ours that answers natively would be called, it is asked at once; in all
// other cases, and when it has no answer, PyTorch's function is called as if nothing had been before it.
//
// What PyTorch hands to a mode is not assumed, but learned from the first call that takes PyTorch's way: nothing is
// shortened of which that call did not get the function itself and these arguments.
#pragma once

#include <pybind11/pybind11.h>

namespace coexec {

class Answering;

// A mode of ours has been called, and this answers; null if Python does.
void mode_reached(const Answering* answering, PyObject* function, PyObject* args, PyObject* kwargs);

// Whether the mode that a call reaches has been asked before, and had no answer.
bool was_declined(PyObject* function);

void bind_shortcuts(pybind11::module_& m);

}  // namespace coexec
