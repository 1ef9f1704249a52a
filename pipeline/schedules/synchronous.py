"""Schedules with a flush: GPipe, 1F1B and no pipelining, over any graph of stages.

In:  a `Layout`.
Out: a `Program` of computation and one update a stage; passes add communication and the rest.

Every gradient of the batch is computed with version 0 of the weights; the update makes version 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.actions import Action, Compute, Kind, Weights
from pipeline.errors import ProgramError
from pipeline.program import Layout, Program


def gpipe(layout: Layout) -> Program:
    """All forward passes, then all backward passes, both in order.

    Source: PTD-P, section 4.2.2, which takes it from GPipe.
    """
    return Program(layout, tuple(tuple(_gpipe_rank(layout, r)) for r in range(layout.ranks)))


def sequential(layout: Layout) -> Program:
    """No pipelining: each micro-batch goes forward and backward before its rank takes the next one."""
    ranks = []
    for r in range(layout.ranks):
        stage = only_stage(layout, r)
        ranks.append((*alternate(stage, layout.owned(stage, r), 1), *finish(layout, r)))
    return Program(layout, tuple(ranks))


def one_f_one_b(layout: Layout) -> Program:
    """PipeDream-Flush: as few forward passes as keep the pipeline full, then backward and forward in turn.

    Source: PipeDream-2BW, section 3.2.2.
    """
    admitted = in_flight(layout)
    ranks = []
    for r in range(layout.ranks):
        stage = only_stage(layout, r)
        order = alternate(stage, layout.owned(stage, r), admitted[stage])
        ranks.append((*order, *finish(layout, r)))
    return Program(layout, tuple(ranks))


def in_flight(layout: Layout) -> tuple[int, ...]:
    """Micro-batches that one replica of each stage admits before its first backward pass.

    The pipeline from a stage to the loss is full when each replica on the longest way there has a
    micro-batch. With one size and one replica everywhere that is p - s for stage s of p; with replicas it is
    the number of workers from the stage on, divided by the stage's replicas and rounded up. Where sizes or
    replicas differ, it is at least so many that no stage waits for itself.

    Source: PipeDream, section 2.4.2 (NOAM), for stages after the input stage and for sizes that differ.
    """
    full = [0] * len(layout.stages)
    admitted = [0] * len(layout.stages)
    for s in reversed(topological(layout)):
        own = layout.stages[s].size * len(layout.stages[s].ranks)
        full[s] = own + max((full[t] for t in layout.successors[s]), default=0)
        enough = (_enough_for(layout, s, t, admitted[t]) for t in layout.successors[s])
        admitted[s] = max(-(-full[s] // own), *enough, 1)
    return tuple(admitted)


def _enough_for(layout: Layout, stage: int, successor: int, admitted: int) -> int:
    """What a stage must admit so that a successor, in turns, comes to the gradients that the stage needs."""
    size, replicas = layout.stages[stage].size, len(layout.stages[stage].ranks)
    other_size, other_replicas = layout.stages[successor].size, len(layout.stages[successor].ranks)
    last = layout.micro_batches(successor) - 1
    enough = 1
    for k in range(layout.micro_batches(stage)):
        # Backward k waits for the successor's backward `gradient`, which comes right after its forward
        # `forward`, which in turn reads the stage's forward passes up to `needed`.
        gradient = layout.overlapping(stage, k, successor)[-1]
        turn, replica = divmod(gradient, other_replicas)
        forward = min((admitted + turn - 1) * other_replicas + replica, last)
        needed = -(-(forward + 1) * other_size // size)
        enough = max(enough, -(-(needed - k % replicas) // replicas) - k // replicas)
    return enough


def topological(layout: Layout) -> list[int]:
    """The stages, each after its predecessors; in order of number where the edges leave a choice."""
    order: list[int] = []
    while len(order) < len(layout.stages):
        order.append(
            next(
                s
                for s in range(len(layout.stages))
                if s not in order and all(p in order for p in layout.predecessors[s])
            )
        )
    return order


def alternate(stage: int, micro_batches: range, admitted: int) -> Iterator[Compute]:
    """Forward passes until `admitted` are in flight, then one backward for one forward, then the rest."""
    ahead = min(admitted, len(micro_batches))
    for k in micro_batches[:ahead]:
        yield Compute(Kind.FORWARD, stage, k)
    for i, k in enumerate(micro_batches):
        yield Compute(Kind.BACKWARD, stage, k)
        if ahead + i < len(micro_batches):
            yield Compute(Kind.FORWARD, stage, micro_batches[ahead + i])


def finish(layout: Layout, rank: int) -> Iterator[Action]:
    """Reduce over replicas where there are any, and update, for each stage of a rank."""
    for stage in layout.hosted(rank):
        if len(layout.stages[stage].ranks) > 1:
            yield Weights(Kind.REDUCE, stage, 1)
        yield Weights(Kind.UPDATE, stage, 1)


def only_stage(layout: Layout, rank: int) -> int:
    """The one stage of a rank.

    Raises:
        ProgramError: The rank has several.
    """
    hosted = layout.hosted(rank)
    if len(hosted) != 1:
        raise ProgramError(f"rank {rank} holds stages {hosted}; this schedule needs one stage a rank.")
    return hosted[0]


def _gpipe_rank(layout: Layout, rank: int) -> Iterator[Action]:
    stage = only_stage(layout, rank)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        yield from (Compute(kind, stage, k) for k in layout.owned(stage, rank))
    yield from finish(layout, rank)
