"""Storages of tensors: their bytes, and where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Addresses of the storages of tensors."""
    local = (local_tensor(t) for t in tensors)
    return frozenset(t.untyped_storage().data_ptr() for t in local if t.layout == torch.strided)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that is here; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
