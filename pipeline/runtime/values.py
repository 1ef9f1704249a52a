"""What a rank has made and somebody still needs: outputs of its stages, and gradients of their inputs.

In:  the program of one rank.
Out: pieces of outputs and gradients by range of samples; each is let go once all that use it have had it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from pipeline.actions import Action, Compute, Kind, Message
from pipeline.dependencies import Result, inputs_of
from pipeline.program import Layout
from pipeline.runtime.stage import Tensors


class Values:
    """Outputs and gradients on one rank."""

    def __init__(self, layout: Layout, rank: int, actions: Sequence[Action]) -> None:
        """Nothing is made yet; the actions tell how often each result will be used."""
        self._layout = layout
        self._uses = Counter(_uses(layout, rank, actions))
        self._made: dict[Result, Mapping[int, Tensors]] = {}

    def put(self, result: Result, by_target: Mapping[int, Tensors]) -> None:
        """Keep a result: what goes to each of the stages that use it."""
        if self._uses[result]:
            self._made[result] = by_target

    def take(self, result: Result, target: int, start: int, stop: int) -> Tensors:
        """The samples `start` up to `stop` of what goes to a stage; one use of the result."""
        first = result.micro_batch * self._layout.stages[result.stage].size
        pieces = tuple(t[start - first : stop - first] for t in self._made[result][target])
        self._uses[result] -= 1
        if not self._uses[result]:
            del self._made[result]
        return pieces


def join(pieces: Sequence[Tensors]) -> Tensors:
    """Pieces of the same tensors, one after the other, in storages of their own."""
    if len(pieces) > 1:
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
    return tuple(t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for t in pieces[0])


def _uses(layout: Layout, rank: int, actions: Sequence[Action]) -> Iterator[Result]:
    for action in actions:
        if isinstance(action, Message) and action.kind is Kind.SEND:
            size = layout.stages[action.source].size
            yield Result(action.gradient, action.source, action.start // size)
        elif isinstance(action, Compute):
            for result in inputs_of(layout, action):
                if layout.owner(result.stage, result.micro_batch) == rank:
                    yield result
