// Copies that lie in memory as their originals do.
#pragma once

#include <ATen/core/Tensor.h>

namespace coexec {

// A copy on memory of its own with the very strides of a tensor, gaps and overlaps included. Kernels go another
// way over memory without gaps, and round otherwise there. The copy begins where its memory does, and needs no
// gradient.
at::Tensor copied(const at::Tensor& tensor);

}  // namespace coexec
