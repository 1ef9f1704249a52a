// How kernels of compiled blocks are cut.
#pragma once

#include "runner.h"

namespace coexec {

// With less, offering a part and taking it would cost more than what is gained.
constexpr double kLeastWork = 3e6;  // floating-point operations

constexpr int kParts = 2;

// Calls a function with each part's number, on the calling thread or on one that waits for it.
template <typename Function>
void compute_parts(Function function, int parts = kParts) {
  Runner::share(parts, [](void* data, int part) { (*static_cast<Function*>(data))(part); }, &function);
}

// A part of a tensor along a dimension. Kernels of products compute several rows at once.
inline at::Tensor piece(const at::Tensor& tensor, int64_t dim, int part) {
  int64_t size = tensor.size(dim);
  int64_t first = size >= 128 ? size / 32 * 16 : size / 2;
  return part == 0 ? tensor.narrow(dim, 0, first) : tensor.narrow(dim, first, size - first);
}

}  // namespace coexec
