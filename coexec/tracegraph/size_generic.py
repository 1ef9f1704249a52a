"""Functions that run the same operations whatever the sizes of their arguments are, from two on.

In:  PyTorch's own code, read: nothing in it chooses operations by a size, and each argument of an operation
     that follows from sizes is one of them, a product or a sum.
Out: a set of functions. What is not in it is traced once for each combination of sizes.

Not in it, for example: `cdist` (another formula from 25 rows on), `einsum` (contracts in an order that
depends on sizes), `chunk` (rounds), `interpolate` (computes scales), `cross` (takes a dimension of three),
what decomposes matrices (which side is longer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_BINARY = (
    "add sub mul div true_divide floor_divide remainder pow maximum minimum fmod atan2 eq ne lt le gt "
    "ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
)
_UNARY = (
    "neg abs exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sign sin cos tan tanh sinh "
    "cosh atan asin acos erf sigmoid relu floor ceil round trunc frac isnan isinf isfinite logical_not "
    "bitwise_not positive clamp clamp_min clamp_max clip nan_to_num"
)
_REDUCTIONS = "sum mean amax amin argmax argmin max min any all cumsum logsumexp softmax log_softmax std var"
_GEOMETRY = (
    "t transpose permute movedim swapaxes view view_as reshape flatten unflatten split unsqueeze "
    "squeeze expand expand_as contiguous narrow select diagonal tril triu flip roll unbind mT T H mH "
    "clone detach data"
)
_SELECTION = (
    "where lerp masked_fill masked_select index_select gather take_along_dim index_add scatter "
    "scatter_add nonzero argsort sort addcmul addcdiv index_copy index_fill masked_scatter"
)
_MATRICES = "matmul mm bmm mv dot addmm addbmm baddbmm addmv outer"
_TYPES = "to float double half bfloat16 int long bool type type_as cpu cuda"
_NEW = (
    "zeros ones full empty arange zeros_like ones_like full_like empty_like rand randn randint "
    "rand_like randn_like randint_like randperm eye new_zeros new_ones new_full new_empty bernoulli"
)
_OPERATORS = (
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __sub__ __mul__ __truediv__ __iadd__ __isub__ "
    "__imul__ __itruediv__ __getitem__ __setitem__ __invert__ __neg__ __radd__ __rsub__ __rmul__ "
    "__rdiv__ __rtruediv__ __rpow__ __pow__ __matmul__ __rmatmul__ __and__ __or__ __xor__ rsub "
    "__mod__ __floordiv__"
)
_TOGETHER = "split cat concat stack hstack vstack broadcast_tensors rsub"
_LAYERS = (
    "linear embedding layer_norm rms_norm group_norm batch_norm instance_norm dropout dropout1d "
    "dropout2d gelu silu mish elu selu celu leaky_relu relu6 hardtanh hardswish hardsigmoid softplus "
    "logsigmoid glu tanhshrink softsign softmax log_softmax normalize cross_entropy nll_loss mse_loss "
    "l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits "
    "cosine_similarity one_hot pad conv1d conv2d conv3d max_pool1d max_pool2d max_pool3d avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool2d scaled_dot_product_attention "
    "multi_head_attention_forward max_pool2d_with_indices max_pool1d_with_indices relu"
)


def _named(owner: Any, names: str, *, in_place: bool = False) -> set[Callable[..., Any]]:
    found: list[Any] = []
    for name in names.split():
        found += [getattr(owner, n, None) for n in ((name, f"{name}_") if in_place else (name,))]
    getters = [f.__get__ for f in found if type(f).__name__ == "getset_descriptor"]
    return {f for f in (*found, *getters) if callable(f) and f.__hash__ is not None}


_POINTWISE = f"{_BINARY} {_UNARY} {_SELECTION} lerp"
_ANYWHERE = f"{_REDUCTIONS} {_GEOMETRY} {_MATRICES} {_NEW}"

SIZE_GENERIC: frozenset[Callable[..., Any]] = frozenset(
    _named(Tensor, f"{_POINTWISE} fill zero copy bernoulli normal uniform", in_place=True)
    | _named(Tensor, f"{_ANYWHERE} {_TYPES} {_OPERATORS}")
    | _named(torch, _POINTWISE, in_place=True)
    | _named(torch, f"{_ANYWHERE} {_TOGETHER} {_LAYERS}")
    | _named(torch._C._nn, _LAYERS, in_place=True)
    | _named(F, _LAYERS, in_place=True)
)
