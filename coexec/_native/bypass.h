// Operations that no function mode has seen, on tensors without their values: C++ code that was handed a placeholder, or
// a tensor with a write that is pending.
//
// These have a dispatch key above autograd. Its kernel hands the tensors to Python, which gives real ones for them,
// before autograd records or saves anything.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

namespace coexec {

// Lets operations on this tensor be seen; whether they were not before.
bool mark(const at::Tensor& tensor);

// Takes that back.
void unmark(const at::Tensor& tensor);

// Lets the operations of this thread pass: those that give the tensors their values.
void let_pass();

void bind_bypass(pybind11::module_& m);

}  // namespace coexec
