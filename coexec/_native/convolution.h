// Convolutions of compiled blocks, in parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace coexec {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of the input, the weight, and the bias

struct Convolution {
  at::IntArrayRef stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;

  // Whether it takes long enough to be computed in parts.
  bool is_cut(const at::Tensor& input, const at::Tensor& weight) const;

  // The same of those gradients that the mask asks for.
  bool are_gradients_cut(const at::Tensor& input, const at::Tensor& weight, std::array<bool, 3> mask) const;

  at::Tensor in_parts(
      const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const;

  // Of the gradients, those that the mask asks for.
  Gradients gradients_in_parts(
      const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
      std::array<bool, 3> mask) const;

 private:
  at::Tensor forward(
      const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const;
  Gradients backward(
      const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
      std::array<bool, 3> mask) const;
};

}  // namespace coexec
