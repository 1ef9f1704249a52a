// The hot path of the dynamic phase: looks calls up that were recorded, and sends them to the queue.
//
// `step` either answers a torch call or returns NotImplemented and has changed nothing; what is rare is
// left to coexec.dynamic.runner. It may also say that Python can make the call itself at once: on small
// tensors that nothing in the queue has to do with, that is cheaper than sending it.
#pragma once
#include <pybind11/pybind11.h>

namespace coexec {
void bind_sender(pybind11::module_& m);
}
