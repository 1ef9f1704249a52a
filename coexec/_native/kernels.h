// The kernels that compiled blocks call.
#pragma once

#include <pybind11/pybind11.h>

namespace coexec {

void bind_kernels(pybind11::module_& m);

}  // namespace coexec
