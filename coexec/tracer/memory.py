"""Names for memory: which value of the trace a tensor's memory and geometry is.

In:  tensors that the dispatcher sees.
Out: the `Source` that made such a tensor, or the memory's first value to view it from.

Below autograd a tensor is its memory and how it looks at it; autograd itself copies tensor objects.
Weak references keep the numbers of storages unique without keeping their memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from coexec._private import storage_of
from coexec.tracegraph.trace import Source

Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool]


def storage_id(tensor: torch.Tensor) -> int:
    """The number of a tensor's memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """A tensor's memory and how it looks at it."""
    return (
        storage_id(tensor),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


@dataclass
class Memory:
    """All memory that has taken part in an iteration."""

    _storages: dict[int, Any] = field(default_factory=dict)
    _values: dict[Geometry, Source] = field(default_factory=dict)
    _roots: dict[int, tuple[Geometry, bool]] = field(default_factory=dict)

    def __contains__(self, storage: int) -> bool:
        return storage in self._storages

    def add(self, tensor: torch.Tensor, source: Source, *, external: bool = False) -> None:
        """Names a tensor's value; the first one of its memory becomes the memory's root."""
        geometry = geometry_of(tensor)
        if geometry[0] not in self._storages:
            self._storages[geometry[0]] = storage_of(tensor)
            self._roots[geometry[0]] = (geometry, external)
        self._values.setdefault(geometry, source)

    def value(self, geometry: Geometry) -> Source | None:
        """The value with exactly this memory and geometry."""
        return self._values.get(geometry)

    def root(self, storage: int) -> tuple[Geometry, Source] | None:
        """The first value in this memory."""
        if storage not in self._roots:
            return None
        geometry = self._roots[storage][0]
        return geometry, self._values[geometry]

    def is_computed(self, storage: int) -> bool:
        """Whether the memory was made inside of the iteration."""
        return storage in self._roots and not self._roots[storage][1]
