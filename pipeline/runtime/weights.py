"""Versions of one stage's weights: the current one in the module, older ones in a ring.

In:  a module and its optimizer.
Out: the module with the weights of a given version, gradients added up for the next one.

`stash` hands the parameters' storages over to the ring and gives the module copies of them. What autograd has
saved of the old version stays right, since it refers to the storages that the update doesn't write to. A
gradient always goes to the parameter's `.grad`, whichever version it was computed with.

Source: PipeDream, section 2.4.3; PipeDream-2BW, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipeline.runtime.averaged import Averaged
from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.storages import addresses, local_tensor


class Weights:
    """The weights of one stage on one rank.

    Attributes:
        current: How many updates have been made.
        frozen: Addresses of the storages in the ring, with the version counter that each parameter had when
            it gave its storage away.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, limit_s: float = 60.0
    ) -> None:
        self.module = module
        self._averaged = Averaged(module, limit_s)
        self.optimizer = optimizer
        self.parameters = list(module.parameters())
        self.current = 0
        self.frozen: dict[int, int] = {}
        self._ring: dict[int, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that are held."""
        local = [local_tensor(p) for p in self.parameters]
        distinct = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
        return (1 + len(self._ring)) * sum(distinct.values())

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are held, oldest first."""
        return (*sorted(self._ring), self.current)

    def storages(self) -> frozenset[int]:
        """Addresses of the storages of every version, and of buffers."""
        ring = (tensor for version in self._ring.values() for tensor in version)
        return addresses((*self.module.parameters(), *self.module.buffers(), *ring))

    def restart(self) -> None:
        """Count versions from 0 again: another run of the program begins."""
        if self._ring:
            raise RunError(f"versions {sorted(self._ring)} of the weights are still stashed.")
        self.current = 0

    def stash(self) -> None:
        """Keep the current version beyond the next update."""
        old = []
        for p in self.parameters:
            old.append(p.data)
            self.frozen[p.untyped_storage().data_ptr()] = p._version
            p.data = p.data.clone()
        self._ring[self.current] = old

    def drop(self, version: int) -> None:
        """Let go of a stashed version."""
        for tensor in self._ring.pop(version, ()):
            self.frozen.pop(tensor.untyped_storage().data_ptr(), None)

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """The module has the weights of a version inside."""
        with self._averaged.deferred():
            if version == self.current:
                yield
            else:
                with self._swapped(version):
                    yield

    @contextmanager
    def _swapped(self, version: int) -> Iterator[None]:
        if version not in self._ring:
            raise RunError(f"version {version} of the weights is not here; {list(self.versions)} are.")
        latest = [p.data for p in self.parameters]
        counters = [p._version for p in self.parameters]
        for p, old in zip(self.parameters, self._ring[version], strict=True):
            p.data = old
        try:
            yield
        finally:
            for p, new in zip(self.parameters, latest, strict=True):
                p.data = new
        if counters != [p._version for p in self.parameters]:
            raise InPlaceError(f"a pass changed version {version} of the weights in place.")

    def update(self, scale: float) -> None:
        """Make the next version from the gradients.

        Args:
            scale: What gradients are multiplied with first.
        """
        self._averaged.average()
        if scale != 1.0:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.mul_(scale)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.current += 1
