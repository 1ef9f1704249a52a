"""Copies that lie in memory as their originals do.

In:  a tensor.
Out: another one on memory of its own, with the very strides of the first, gaps and overlaps included, and at
     the same place of a cache line.

`clone` closes gaps. Kernels go another way over memory without gaps, or from another place on, and round
otherwise there: a product of matrices has other last bits where its arguments begin 4 bytes later.
"""

from __future__ import annotations

from typing import Any

import torch

from coexec._native import core

#: Memory of tensors begins with one of these.
_CACHE_LINE = 64


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a tensor, on memory that is placed like its memory; it needs no gradient."""
    if core is not None:
        made: torch.Tensor = core.copied(tensor)
        return made
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_nested:
        return plain.clone()
    before = plain.data_ptr() % _CACHE_LINE // plain.element_size() if plain.numel() else 0
    memory = torch.empty(before + _span(plain), dtype=plain.dtype, device=plain.device)
    made = memory.as_strided(plain.shape, plain.stride(), before)
    overwrite(made, plain)
    return made


if core is None:
    _library = torch.library.Library("coexec", "DEF")  # it lives as long as the module
    _library.define("copied(Tensor self) -> Tensor")
    _library.impl("copied", copied, "CompositeExplicitAutograd")

#: The operation that makes such a copy.
COPIED: Any = torch.ops.coexec.copied.default


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values to the memory of a tensor with the same strides, whose elements may overlap."""
    if tensor.numel() == 0:
        return
    if not _may_overlap(tensor):
        tensor.copy_(values)
        return
    memory, given = (t.as_strided((_span(tensor),), (1,), t.storage_offset()) for t in (tensor, values))
    memory.copy_(given)


def _span(tensor: torch.Tensor) -> int:
    """How many elements there are between the first and the last one, with these."""
    return 1 + sum(max(n - 1, 0) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may lie on each other: no if each dimension steps over what the smaller ones span."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False
