"""What a computation needs from other computations.

In:  a layout and a `Compute`.
Out: the forward and backward passes that must be done before it.

The one place that knows how a graph of stages turns into an order; validator, simulator and passes ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.actions import Compute, Kind
from pipeline.program import Layout


class Result(NamedTuple):
    """The output of a stage for one micro-batch, or the gradient of its input."""

    gradient: bool
    stage: int
    micro_batch: int


def result_of(action: Compute) -> Result | None:
    """What others can use once the action is done; None for recomputation and weight parts."""
    if action.kind is Kind.FORWARD:
        return Result(False, action.stage, action.micro_batch)
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return Result(True, action.stage, action.micro_batch)
    return None


def inputs_of(layout: Layout, action: Compute) -> Iterator[Result]:
    """Results of other stages that it reads: a forward its predecessors', a backward its successors'."""
    stage, k = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        for p in layout.predecessors[stage]:
            for j in layout.overlapping(stage, k, p):
                yield Result(False, p, j)
    elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        for t in layout.successors[stage]:
            for j in layout.overlapping(stage, k, t):
                yield Result(True, t, j)


def needs(layout: Layout, action: Compute) -> Iterator[Result]:
    """All results that must exist before the action, also those of its own stage."""
    yield from inputs_of(layout, action)
    if action.kind is Kind.BACKWARD_WEIGHT:
        yield Result(True, action.stage, action.micro_batch)
    elif action.kind is not Kind.FORWARD:
        yield Result(False, action.stage, action.micro_batch)
