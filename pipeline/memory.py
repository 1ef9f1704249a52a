"""How many bytes each rank holds as its program goes on.

In:  a program and the costs of its stages.
Out: for each rank, the bytes held while each action runs; their maximum is the peak.

A rank's bytes depend on its own order alone, whatever the others do: something that is started counts from
its start, something that is given away counts until the wait for it. Counted are weights (one current version
of each stage, stashed ones until their last use) and the state beside them, what is saved between forward and
backward (only the input, until `RC`, when the micro-batch is recomputed), what is held for others, and
received messages not yet used. What a rank has sent is not counted: when it is let go depends on the other
side.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from pipeline.actions import Action, Compute, Kind, Message, Transfer, Wait, Weights
from pipeline.plans import StageCost
from pipeline.program import Layout, Program

MICRO_BATCHES = StageCost(saved_bytes=1.0)
"""Costs at which bytes count the micro-batches held and nothing else."""


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that an action takes when it starts, and gives back when it is over."""

    before: float = 0.0
    after: float = 0.0


_NONE = Change()


def peaks(program: Program, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """The most bytes that each rank holds at a time."""
    return tuple(max(trace) for trace in memory_traces(program, costs))


def memory_traces(program: Program, costs: Sequence[StageCost]) -> tuple[tuple[float, ...], ...]:
    """Bytes that each rank holds while each of its actions runs; one more entry for the end."""
    traces = []
    for r, rank_changes in enumerate(changes(program, costs)):
        held = initial_bytes(program.layout, costs, r)
        trace = []
        for change in rank_changes:
            held += change.before
            trace.append(held)
            held -= change.after
        traces.append((*trace, held))
    return tuple(traces)


def initial_bytes(layout: Layout, costs: Sequence[StageCost], rank: int) -> float:
    """Bytes that a rank holds before its first action: weights, gradients and optimizer state."""
    return sum(costs[s].parameter_bytes + costs[s].state_bytes for s in layout.hosted(rank))


def changes(program: Program, costs: Sequence[StageCost]) -> list[list[Change]]:
    """What each action of each rank does to the rank's bytes."""
    recomputed = recomputed_items(program)
    return [_rank_changes(program.layout, costs, recomputed, actions) for actions in program.ranks]


def recomputed_items(program: Program) -> frozenset[tuple[int, int]]:
    """Stage and micro-batch of everything that is recomputed."""
    return frozenset(
        (a.stage, a.micro_batch)
        for actions in program.ranks
        for a in actions
        if isinstance(a, Compute) and a.kind is Kind.RECOMPUTE
    )


def _rank_changes(
    layout: Layout,
    costs: Sequence[StageCost],
    recomputed: Set[tuple[int, int]],
    actions: Sequence[Action],
) -> list[Change]:
    last_use = _last_uses(actions)
    stashed: set[tuple[int, int]] = set()
    result = []
    for i, action in enumerate(actions):
        change = _change(layout, costs, recomputed, action)
        if isinstance(action, Weights) and action.kind is Kind.STASH:
            stashed.add((action.stage, action.version))
        if isinstance(action, Compute):
            version = (action.stage, action.version)
            if version in stashed and last_use[version] == i:
                stashed.discard(version)
                change = Change(change.before, change.after + costs[action.stage].parameter_bytes)
        result.append(change)
    return result


def _last_uses(actions: Sequence[Action]) -> dict[tuple[int, int], int]:
    return {(a.stage, a.version): i for i, a in enumerate(actions) if isinstance(a, Compute)}


def _change(
    layout: Layout, costs: Sequence[StageCost], recomputed: Set[tuple[int, int]], action: Action
) -> Change:
    if isinstance(action, Compute):
        return _compute_change(layout, costs, (action.stage, action.micro_batch) in recomputed, action)
    if isinstance(action, Transfer):
        size = _held(costs[action.stage], (action.stage, action.micro_batch) in recomputed)
        return Change(size) if action.kind in (Kind.ACCEPT, Kind.LOAD) else _NONE
    if isinstance(action, Wait) and isinstance(action.on, Transfer):
        size = _held(costs[action.on.stage], (action.on.stage, action.on.micro_batch) in recomputed)
        return Change(0.0, size) if action.on.kind in (Kind.EVICT, Kind.RETURN) else _NONE
    if isinstance(action, Message) and action.kind is Kind.RECEIVE:
        return Change(message_bytes(layout, costs, action))
    if isinstance(action, Weights) and action.kind is Kind.STASH:
        return Change(costs[action.stage].parameter_bytes)
    return _NONE


def message_bytes(layout: Layout, costs: Sequence[StageCost], message: Message) -> float:
    """Bytes of a message: its share of the output of the stage that makes it, or whose gradient it is."""
    stage = message.target if message.gradient else message.source
    return costs[stage].output_bytes * (message.stop - message.start) / layout.stages[stage].size


def transfer_bytes(cost: StageCost, *, recomputed: bool) -> float:
    """Bytes that eviction moves: what the stage holds for a micro-batch between forward and backward."""
    return _held(cost, recomputed)


def _held(cost: StageCost, recomputed: bool) -> float:
    return cost.input_bytes if recomputed else cost.saved_bytes


def _compute_change(layout: Layout, costs: Sequence[StageCost], recomputed: bool, action: Compute) -> Change:
    cost = costs[action.stage]
    held = _held(cost, recomputed)
    if action.kind is Kind.FORWARD:
        return Change(held, _received(layout, costs, action, gradient=False))
    if action.kind is Kind.RECOMPUTE:
        return Change(cost.saved_bytes - held)
    if action.kind is Kind.BACKWARD:
        return Change(0.0, cost.saved_bytes + _received(layout, costs, action, gradient=True))
    if action.kind is Kind.BACKWARD_INPUT:
        return Change(0.0, _received(layout, costs, action, gradient=True))
    return Change(0.0, cost.saved_bytes)


def _received(layout: Layout, costs: Sequence[StageCost], action: Compute, *, gradient: bool) -> float:
    """Bytes of the messages that a pass uses up: those from stages on other ranks."""
    stage, k = action.stage, action.micro_batch
    rank = layout.owner(stage, k)
    total = 0.0
    for other in layout.successors[stage] if gradient else layout.predecessors[stage]:
        sized = stage if gradient else other
        for j in layout.overlapping(stage, k, other):
            if layout.owner(other, j) != rank:
                samples = len(layout.shared_samples(stage, k, other, j))
                total += costs[sized].output_bytes * samples / layout.stages[sized].size
    return total
