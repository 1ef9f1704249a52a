"""Operations that cannot fail on arguments like those of the traces, whatever their values are.

In:  PyTorch's own kernels, read: none of these looks at a value and raises.
Out: whether a call may be put off to the commit, where nothing may fail any more.

What is not here runs before, on copies of what is written: what checks indices, divides integers, decomposes
matrices. Shapes and types are those of the traces, so errors about these do not occur.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from coexec.tracegraph.instructions import registers_in
from coexec.tracegraph.program import Call
from coexec.tracegraph.trace import TensorMeta

_POINTWISE = (
    "add sub rsub mul neg abs sign sgn exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square "
    "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh atan2 hypot sigmoid erf erfc erfinv "
    "floor ceil round trunc frac clamp clamp_min clamp_max maximum minimum fmax fmin where masked_fill eq "
    "ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_xor logical_not bitwise_and "
    "bitwise_or bitwise_xor bitwise_not nan_to_num addcmul addcdiv lerp copy fill zero clone _to_copy "
    "polygamma xlogy"
)
_MADE = (
    "zeros ones empty full zeros_like ones_like empty_like full_like new_zeros new_ones new_empty "
    "new_full new_empty_strided empty_strided arange scalar_tensor eye rand randn rand_like randn_like "
    "normal uniform native_dropout native_dropout_backward"
)
_REDUCTIONS = (
    "sum mean amax amin aminmax prod cumsum var std var_mean norm linalg_vector_norm all any argmax "
    "argmin logsumexp _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"
)
_MATRICES = "mm bmm addmm baddbmm addbmm mv addmv dot vdot outer ger addr linear"
_LAYERS = (
    "convolution convolution_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward max_pool2d_with_indices "
    "max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward relu gelu gelu_backward silu silu_backward mish mish_backward elu "
    "elu_backward leaky_relu leaky_relu_backward softplus softplus_backward hardtanh hardtanh_backward "
    "hardswish hardswish_backward hardsigmoid hardsigmoid_backward threshold threshold_backward "
    "tanh_backward sigmoid_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward "
    "huber_loss huber_loss_backward binary_cross_entropy_with_logits "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward"
)
_TOGETHER = "cat stack flip roll tril triu constant_pad_nd repeat"
_UPDATES = "adam adamw sgd adagrad"

_NEVER_FAIL = frozenset(
    [f"aten::{n}" for n in f"{_POINTWISE} {_MADE} {_REDUCTIONS} {_MATRICES} {_LAYERS} {_TOGETHER}".split()]
    + [f"aten::_fused_{n}" for n in _UPDATES.split()]
    + ["aten::_amp_foreach_non_finite_check_and_unscale", "aten::_amp_update_scale"]
)
#: Of divisions, those that round; the others do not fail.
_ROUNDED = ("Tensor_mode", "Scalar_mode")

#: Types that hold every number; others refuse some.
_HOLD_ALL = {torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128}


def may_fail(call: Call, meta_of: Callable[[int], TensorMeta | None]) -> bool:
    """Whether a call may raise on some values: then it has to run before anything is committed.

    Args:
        call: the call.
        meta_of: the metadata of a register; None where it holds a number.
    """
    schema = call.target._schema
    name = schema.name.replace("aten::_foreach_", "aten::").removesuffix("_")
    divides = name == "aten::div" and call.target._overloadname not in _ROUNDED
    if name == "aten::pow":  # of integers, those with negative exponents
        return any(m is None or m.dtype not in _HOLD_ALL for m in map(meta_of, _registers(call)))
    return not (divides or name in _NEVER_FAIL) or _may_not_fit(call, meta_of)


def _registers(call: Call) -> list[int]:
    return [r for a in call.args for r in registers_in(a)]


def _may_not_fit(call: Call, meta_of: Callable[[int], TensorMeta | None]) -> bool:
    """Whether a number that varies goes to a tensor of a type that does not hold every number."""
    metas = [meta_of(r) for r in _registers(call)]
    varies = any(m is None for m in metas)
    return varies and any(m is not None and m.dtype not in _HOLD_ALL for m in metas)
