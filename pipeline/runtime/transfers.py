"""What stages saved, on its way to another rank and back.

In:  transfers to start, and those that have completed.
Out: storages, here or held for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

import torch

from pipeline.actions import Kind, Transfer
from pipeline.runtime.channels import Channels, Pending
from pipeline.runtime.errors import RunError
from pipeline.runtime.specs import StageSpec
from pipeline.runtime.stage import StageRunner

Item = tuple[int, int]
"""A stage and a micro-batch."""


class Transfers:
    """Storages that one rank holds for others, or gets back."""

    def __init__(
        self,
        channels: Channels,
        stages: Mapping[int, StageRunner],
        recomputed: Set[Item],
        device: torch.device,
    ) -> None:
        self._channels, self._stages = channels, stages
        self._recomputed, self._device = recomputed, device
        self._parts: dict[Item, list[torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held for other ranks, or are coming back."""
        return sum(t.nbytes for parts in self._parts.values() for t in parts)

    def begin(self, specs: Sequence[StageSpec]) -> None:
        """A run begins."""
        self._specs = specs
        self._parts.clear()

    def start(self, action: Transfer) -> Pending:
        """Start giving or taking."""
        item = (action.stage, action.micro_batch)
        if action.kind is Kind.EVICT:
            parts = self._stages[action.stage].saved(action.micro_batch).give()
            self._check_sizes(item, parts)
        elif action.kind is Kind.RETURN:
            parts = self._parts[item]
        else:
            parts = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in self._sizes(item)]
            self._parts[item] = parts
        return self._channels.start(action, parts)

    def complete(self, action: Transfer) -> Callable[[], None] | None:
        """Something has arrived; gives what is to be done when the wait for it is over."""
        item = (action.stage, action.micro_batch)
        if action.kind is Kind.EVICT:
            return self._stages[item[0]].saved(item[1]).release
        if action.kind is Kind.RETURN:
            return partial(self._let_go, item)
        if action.kind is Kind.LOAD:
            self._stages[item[0]].saved(item[1]).take(self._parts.pop(item))
        return None

    def _let_go(self, item: Item) -> None:
        del self._parts[item]

    def _sizes(self, item: Item) -> tuple[int, ...]:
        spec = self._specs[item[0]]
        return spec.kept if item in self._recomputed else spec.saved

    def _check_sizes(self, item: Item, parts: Sequence[torch.Tensor]) -> None:
        here, expected = [p.numel() for p in parts], list(self._sizes(item))
        if here != expected:
            raise RunError(
                f"the stage saved {len(here)} storages of {sum(here)} bytes, and {len(expected)} of"
                f" {sum(expected)} when it was tried. Stages whose sizes change can't be evicted."
            )
