"""Copies that lie in memory as their originals do.

In:  a tensor.
Out: another one on memory of its own, with the very strides of the first: gaps and overlaps included.

`clone` closes gaps. Kernels go another way over memory without gaps, and round otherwise there.
"""

from __future__ import annotations

import torch

from coexec._native import core


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of a tensor, which begins where its memory does, and needs no gradient."""
    if core is not None:
        made: torch.Tensor = core.copied(tensor)
        return made
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_nested:
        return plain.clone()
    made = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    overwrite(made, plain)
    return made


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values to the memory of a tensor with the same strides, whose elements may overlap."""
    if tensor.numel() == 0:
        return
    if not _may_overlap(tensor):
        tensor.copy_(values)
        return
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (t.as_strided((span,), (1,), t.storage_offset()) for t in (tensor, values))
    next(memory).copy_(next(memory))


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may lie on each other: no if each dimension steps over what the smaller ones span."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False
