"""Decompositions that other libraries' front ends need beside core ATen's.

The backward of a convolution is a convolution of the gradient: transposed for the input, with batch
and channels exchanged for the weight. No front end's table has it as one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@lru_cache(maxsize=1)
def front_end_table() -> dict[Any, Callable[..., Any]]:
    """Core ATen's decompositions and those of this file."""
    from torch._decomp import core_aten_decompositions

    table = dict(core_aten_decompositions())
    table[aten.convolution_backward.default] = convolution_backward
    return table


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution with respect to input, weight and bias, by convolutions.

    Args:
        grad: gradient of the output, (N, C_out, *spatial).
        x: the input, (N, C_in, *spatial).
        weight: (C_out, C_in / groups, *kernel); for a transposed one (C_in, C_out / groups, *kernel).
        bias_sizes: the bias' shape; None where there is none.
        stride: one number a spatial dimension, as are padding, dilation and output_padding.
        padding: see `stride`.
        dilation: see `stride`.
        transposed: whether it is the backward of a transposed convolution.
        output_padding: of the transposed convolution.
        groups: how many groups the channels are in.
        output_mask: which of the three to compute.
    """
    dims = x.dim() - 2
    stride, padding, dilation = (_per_dim(v, dims) for v in (stride, padding, dilation))
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_x = aten.convolution(
                grad, weight, None, stride, padding, dilation, False, [0] * dims, groups
            )
        else:
            extra = [
                x.shape[d + 2]
                - (
                    (grad.shape[d + 2] - 1) * stride[d]
                    - 2 * padding[d]
                    + dilation[d] * (weight.shape[d + 2] - 1)
                    + 1
                )
                for d in range(dims)
            ]
            grad_x = aten.convolution(grad, weight, None, stride, padding, dilation, True, extra, groups)
    if output_mask[1]:
        # For a transposed convolution, input and gradient exchange their parts.
        signal, kernel = (grad, x) if transposed else (x, grad)
        grad_weight = _weight_gradient(signal, kernel, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad.sum([0, *range(2, grad.dim())])
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    signal: Tensor,
    kernel: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Correlates a signal (N, G*I, *S) with a kernel (N, G*O, *K): gives (G*O, I, *weight's kernel)."""
    n, spatial = signal.shape[0], signal.shape[2:]
    per_in, per_out = signal.shape[1] // groups, kernel.shape[1] // groups
    # The batch becomes what is summed over, the channels of the signal become the batch.
    moved = signal.reshape(n, groups, per_in, *spatial).transpose(0, 2).reshape(per_in, groups * n, *spatial)
    filters = kernel.reshape(n, groups, per_out, *kernel.shape[2:]).movedim(0, 2)
    filters = filters.reshape(groups * per_out, n, *kernel.shape[2:])
    dims = len(spatial)
    out: Tensor = aten.convolution(moved, filters, None, dilation, padding, stride, False, [0] * dims, groups)
    for d in range(dims):  # rows that the stride skipped at the far border
        out = out.narrow(d + 2, 0, weight.shape[d + 2])
    return out.transpose(0, 1)


def _per_dim(values: Sequence[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)
