// Copies that lie in memory as their originals do.
#pragma once

#include <ATen/core/Tensor.h>

namespace coexec {

// A copy on memory of its own with the very strides of a tensor, gaps and overlaps included, that begins at the same
// place of a cache line. Kernels go another way over memory without gaps, or from another place on, and round
// otherwise there. The copy has no offset, and needs no gradient.
at::Tensor copied(const at::Tensor& tensor);

// The same, but for where it begins: memory of the usual kind, which may grow.
at::Tensor copied_anywhere(const at::Tensor& tensor);

}  // namespace coexec
