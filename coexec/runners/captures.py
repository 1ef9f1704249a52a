"""The tensors that a graph has captured, found again in each iteration.

In:  for each captured tensor a reference that does not keep it alive, what the graph calls it, and which of
     them the program cannot do without.
Out: the tensors, or the news that one of these is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coexec._native import core
from coexec.tracegraph.graph import Captured, Fed


@dataclass(frozen=True, slots=True)
class Found:
    """The captured tensors of an iteration.

    Attributes:
        tensors: in the order of the graph; None for one that is gone and that only some paths use.
        externals: what the graph calls each, by the id of the tensor. Belongs to the iteration.
        bound: those that the program reads or writes.
    """

    tensors: list[torch.Tensor | None]
    externals: dict[int, Captured | Fed]
    bound: list[torch.Tensor]


class Captures:
    """Holds captured tensors by references that do not keep them alive."""

    def __init__(
        self,
        references: tuple[Callable[[], torch.Tensor | None], ...],
        names: tuple[Captured, ...],
        bound: Sequence[int],
    ) -> None:
        self._references, self._names, self._bound = references, names, bound
        self._native: Any = None if core is None else core.Captures(references, names, bound)

    def find(self) -> Found | None:
        """The tensors; None if a bound one is gone."""
        if self._native is not None:
            native = self._native.find()
            return None if native is None else Found(*native)
        tensors = [reference() for reference in self._references]
        bound = [t for i in self._bound if (t := tensors[i]) is not None]
        if len(bound) < len(self._bound):
            return None
        named = zip(tensors, self._names, strict=True)
        return Found(tensors, {id(t): name for t, name in named if t is not None}, bound)
