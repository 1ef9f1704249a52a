// The C++ code behind the `apply` of autograd functions, watched wherever Python got it from.
#pragma once

#include <torch/extension.h>

namespace coexec {

void bind_apply(pybind11::module_& m);

}  // namespace coexec
