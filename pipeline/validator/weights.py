"""Versions of weights are there when they are used, and updates take in what belongs to them.

A backward pass uses its forward's version; an update takes in exactly the gradients of its samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.actions import Compute, Kind, Weights
from pipeline.program import Layout, Program, StageLayout
from pipeline.validator.problems import Problem, problem


@dataclass(slots=True)
class _Held:
    """What a rank has of one stage's weights: the current version, stashed ones, and gradients per update."""

    current: int = 0
    stashed: set[int] = field(default_factory=set)
    used: dict[int, int] = field(default_factory=dict)
    gradients: int = 0
    reduced: int = 0


def weight_problems(program: Program) -> list[Problem]:
    """Wrong, lost and mixed-up versions, on each rank."""
    problems = []
    for r, actions in enumerate(program.ranks):
        held = {s: _Held() for s in program.layout.hosted(r)}
        for i, action in enumerate(actions):
            reasons: Iterator[str] = iter(())
            if isinstance(action, Compute):
                reasons = _compute(program.layout, held[action.stage], action)
            elif isinstance(action, Weights):
                reasons = _weights(program.layout, r, held[action.stage], action)
            problems += [problem(program, r, i, reason) for reason in reasons]
    return problems


def _compute(layout: Layout, held: _Held, action: Compute) -> Iterator[str]:
    if action.version != held.current and action.version not in held.stashed:
        yield (
            f"version {action.version} is not there; the current one is {held.current},"
            f" stashed are {sorted(held.stashed)}"
        )
    if action.kind is Kind.FORWARD:
        held.used[action.micro_batch] = action.version
        return
    used = held.used.get(action.micro_batch, action.version)
    if used != action.version:
        yield f"uses version {action.version} where its forward pass used version {used}"
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
        belongs = action.micro_batch * layout.stages[action.stage].size // layout.stages[action.stage].update
        if belongs != held.current:
            yield f"its gradient belongs to UPDATE w{belongs + 1}, and the next one is w{held.current + 1}"
        if held.reduced > held.current:
            yield f"its gradient comes after REDUCE w{held.reduced}, which has to take it in"
        held.gradients += 1


def _weights(layout: Layout, rank: int, held: _Held, action: Weights) -> Iterator[str]:
    stage = layout.stages[action.stage]
    if action.kind is Kind.STASH:
        if action.version != held.current:
            yield f"only the current version can be stashed, which is {held.current}"
        held.stashed.add(action.version)
        return
    if action.version != held.current + 1:
        yield f"the next version is {held.current + 1}"
    expected = _gradients(stage, rank, action.version)
    if held.gradients != expected:
        yield f"takes in {held.gradients} gradients of this rank; {expected} belong to it"
    if action.kind is Kind.REDUCE:
        held.reduced = action.version
        return
    if len(stage.ranks) > 1 and held.reduced != action.version:
        yield f"the gradients of the {len(stage.ranks)} replicas have not been reduced"
    held.current = action.version
    held.gradients = 0


def _gradients(stage: StageLayout, rank: int, version: int) -> int:
    """How many micro-batches of a replica an update takes in."""
    start, stop = ((v * stage.update) // stage.size for v in (version - 1, version))
    replicas = len(stage.ranks)
    first = start + (stage.ranks.index(rank) - start) % replicas
    return len(range(first, stop, replicas))
