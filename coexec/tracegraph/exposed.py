"""Memory that Python sees through NumPy.

`Tensor.numpy()` gives Python an array on the tensor's own memory. As long as the array lives, Python
can write to it, and a later in-place operation shows in it; no torch call tells of either.

In:  arrays as they are handed out.
Out: what has been written since, asked before each torch call.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from coexec.tracegraph.copies import copied


@dataclass(slots=True)
class Exposure:
    """An array, or a tensor on an array's memory: a weak reference to it, the memory, what was in it."""

    array: weakref.ref[Any]
    memory: torch.Tensor
    contents: torch.Tensor

    @property
    def alive(self) -> bool:
        """Whether Python can still see the memory (views keep the array alive)."""
        return self.array() is not None

    @property
    def written(self) -> bool:
        """Whether the memory has changed since `contents` was taken."""
        return not _same(self.memory, self.contents)


def expose(array: Any, memory: torch.Tensor) -> Exposure:
    """Remembers an array that shares `memory`."""
    plain = memory.data  # putting contents back must not look like a write to autograd
    return Exposure(weakref.ref(array), plain, copied(plain))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    a, b = _real(a), _real(b)
    bits = _BITS[a.element_size()]
    if _is_whole_words(a) and _is_whole_words(b):
        a, b, bits = a.view(-1), b.view(-1), torch.int64  # fewer, larger numbers
    return torch.equal(a.view(bits), b.view(bits))


def _is_whole_words(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be viewed as numbers of eight bytes: it begins and ends with one of its memory."""
    begins, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and begins % 8 == 0 and size % 8 == 0


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
