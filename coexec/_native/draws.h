// Random numbers of the CPU's default generator: the same as PyTorch's kernels draw, several at a time.
#pragma once

#include <ATen/core/Tensor.h>

namespace coexec {

// tensor.bernoulli_(p). Nobody may need its gradient or see its version.
void draw_bernoulli(at::Tensor tensor, double p);

// tensor.uniform_(0, 1), likewise.
void draw_uniform(at::Tensor tensor);

}  // namespace coexec
