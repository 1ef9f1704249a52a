#include "convolution.h"

#include "parts.h"

#include <ATen/Functions.h>

#include <mutex>
#include <vector>

namespace coexec {

namespace {

// A tensor of `size` rows that lies in memory as one with fewer of them does.
at::Tensor empty_like_part(const at::Tensor& part, int64_t size) {
  std::vector<int64_t> sizes = part.sizes().vec();
  sizes[0] = size;
  return at::empty_strided(sizes, part.strides(), part.options());
}

// Rows that `compute` gives for each part of them.
template <typename Function>
at::Tensor rows_in_parts(int64_t rows, Function compute) {
  std::mutex mutex;
  at::Tensor all;
  compute_parts([&](int part) {
    at::Tensor some = compute(part);
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (!all.defined()) all = empty_like_part(some, rows);
    }
    piece(all, 0, part).copy_(some);
  });
  return all;
}

bool is_batched(const at::Tensor& input, const at::Tensor& weight) {
  return input.dim() == weight.dim() && input.numel() > 0 && weight.numel() > 0;
}

void add_to(at::Tensor& sum, const at::Tensor& other) {
  if (other.defined()) sum.add_(other);
}

}  // namespace

bool Convolution::is_cut(const at::Tensor& input, const at::Tensor& weight) const {
  // A part of one example could be computed by another kernel, which gives other strides.
  if (!is_batched(input, weight) || input.size(0) < 2 * kParts) return false;
  double work = 2.0 * static_cast<double>(weight.numel()) * static_cast<double>(input.size(0));
  for (int64_t d = 2; d < input.dim(); ++d) {
    int64_t reach = dilation[d - 2] * (weight.size(d) - 1);
    int64_t steps = transposed ? input.size(d) : (input.size(d) + 2 * padding[d - 2] - reach - 1) / stride[d - 2] + 1;
    work *= static_cast<double>(steps);
  }
  return work >= kLeastWork;
}

bool Convolution::are_gradients_cut(
    const at::Tensor& input, const at::Tensor& weight, std::array<bool, 3> mask) const {
  // The two gradients are two kernels anyway, each of which takes long to begin.
  if (mask[0] && mask[1]) return is_batched(input, weight);
  return is_cut(input, weight);
}

at::Tensor Convolution::forward(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const {
  return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

Gradients Convolution::backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
    std::array<bool, 3> mask) const {
  return at::convolution_backward(
      grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
}

at::Tensor Convolution::in_parts(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const {
  return rows_in_parts(input.size(0), [&](int part) { return forward(piece(input, 0, part), weight, bias); });
}

// The two gradients do not depend on each other. Where only one is asked for, each part is of half of the batch.
Gradients Convolution::gradients_in_parts(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
    std::array<bool, 3> mask) const {
  auto of_part = [&](int part) {
    return backward(piece(grad, 0, part), piece(input, 0, part), weight, bias_sizes, mask);
  };
  if (mask[0] && !mask[1] && !mask[2]) {
    at::Tensor of_input = rows_in_parts(input.size(0), [&](int part) { return std::get<0>(of_part(part)); });
    return {of_input, at::Tensor(), at::Tensor()};
  }
  std::array<Gradients, kParts> made;
  compute_parts([&](int part) {
    if (!mask[0]) {
      made[part] = of_part(part);
    } else {
      std::array<bool, 3> one = part == 0 ? std::array{true, false, false} : std::array{false, mask[1], mask[2]};
      made[part] = backward(grad, input, weight, bias_sizes, one);
    }
  });
  auto& [of_input, some_of_weight, some_of_bias] = made[0];
  auto& [none, of_weight, of_bias] = made[1];
  add_to(of_weight, some_of_weight);
  add_to(of_bias, some_of_bias);
  return {of_input, of_weight, of_bias};
}

}  // namespace coexec
