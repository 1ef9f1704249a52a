"""PipeDream's planner: a dynamic programme over cuts and replicas, level by level of the topology.

In:  a profiled graph, a topology, and `Limits`.
Out: a `Plan` whose slowest stage is as fast as possible; `predicted.time_s` is its time per micro-batch.

At each level, the components of the level below are the machines, and the best time of a part of the model on
one of them is what the level below has found. `cost_models` has the two ways of counting.

Source: PipeDream, section 2.4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, lcm

import numpy as np

from pipeline.errors import PlanError
from pipeline.graph import ProfiledGraph
from pipeline.ideals import State, states, without_ends
from pipeline.planners.cost_models import COST_MODELS, Array, CostModel, Cuts
from pipeline.plans import Plan, Predicted, Stage, StageCost
from pipeline.topology import Topology


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner may do.

    Attributes:
        cost_model: `paper` or `original`; see `pipeline.planners.cost_models`.
        straight: No replicas.
        check_memory: Keep weights and outputs in flight within the topology's memory (`original` only).
        fewer_machines: Leave devices unused where that is faster (`original` only).
        compression: Count the transfer of activations, divided by this; None: leave it out (`original` only).
    """

    cost_model: str = "paper"
    straight: bool = False
    check_memory: bool = False
    fewer_machines: bool = False
    compression: float | None = None


@dataclass(frozen=True, slots=True)
class _Level:
    """A level that has been solved.

    Attributes:
        best: `best[m - 1][i][j]`: time of the slowest stage of the best pipeline for what lies between state
            i - 1 (nothing, for 0) and state j, on m machines; infinite where there is none.
        whole: The same with a single stage.
        model: The costs that these came from.
    """

    best: list[Array]
    whole: list[Array]
    model: CostModel


def plan(graph: ProfiledGraph, topology: Topology, limits: Limits | None = None) -> Plan:
    """The plan whose slowest stage takes least time.

    Raises:
        PlanError: Nothing fits within the limits, or they contradict each other.
    """
    limits = Limits() if limits is None else limits
    _check(topology, limits)
    cut_at = states(without_ends(graph))
    levels = _solve(cut_at, topology, limits)
    time_s = float(levels[-1].best[-1][0, -1])
    if not np.isfinite(time_s):
        raise PlanError(f"{graph.model.name}: no plan for {topology.devices} devices fits within the limits.")
    parts = list(_unfold(levels, topology, len(levels) - 1, 0, len(cut_at) - 1, 0))
    return _plan(graph, cut_at, parts, limits, topology, time_s)


def _check(topology: Topology, limits: Limits) -> None:
    if limits.cost_model not in COST_MODELS:
        raise PlanError(f"cost model {limits.cost_model!r}; one of {', '.join(COST_MODELS)}.")
    if limits.cost_model == "paper" and (limits.check_memory or limits.fewer_machines or limits.compression):
        raise PlanError("memory, fewer machines and compression are options of the cost model `original`.")
    if limits.check_memory and topology.memory_bytes is None:
        raise PlanError("memory is to be checked, and the topology doesn't say how much a device has.")
    if limits.compression is not None and not limits.compression > 0:
        raise PlanError(f"compression is {limits.compression}; it must be positive.")


def _solve(cut_at: Sequence[State], topology: Topology, limits: Limits) -> list[_Level]:
    cuts = Cuts.of(cut_at)
    levels: list[_Level] = []
    compute, within = cuts.seconds, 1
    for k, level in enumerate(topology.levels):
        model = COST_MODELS[limits.cost_model](
            cuts,
            compute,
            machines=level.count,
            within=within,
            bandwidth=level.bandwidth,
            memory_bytes=topology.memory_bytes if limits.check_memory else None,
            compression=limits.compression,
        )
        rows = slice(0, 1) if k == len(topology.levels) - 1 else slice(None)
        levels.append(_solve_level(model, level.count, rows, limits))
        compute, within = levels[-1].best[-1], level.count
    return levels


def _solve_level(model: CostModel, machines: int, rows: slice, limits: Limits) -> _Level:
    """Solve one level, for the parts of the model that start at the given rows."""
    whole = [
        np.full_like(model.compute, np.inf) if limits.straight and m > 1 else model.alone(m)
        for m in range(1, machines + 1)
    ]
    best: list[Array] = []
    for m in range(1, machines + 1):
        here = whole[m - 1][rows].copy()
        if limits.fewer_machines and m > 1:
            here = np.minimum(here, best[m - 2])
        for last in range(1, 2 if limits.straight else m):
            if last < m:
                here = np.minimum(here, _joined(best[m - last - 1], model.last(last, m), model, last))
        best.append(here)
    return _Level(best, whole, model)


def _joined(before: Array, last: Array, model: CostModel, replicas: int) -> Array:
    """Best over all cuts of a pipeline up to the cut and one last stage after it."""
    arriving, leaving = model.transfer_in(replicas), model.transfer_out(replicas)
    fed = np.maximum(before, arriving[None, :])
    result = np.full_like(before, np.inf)
    for j in range(1, before.shape[1]):
        rows = min(before.shape[0], j + 1)  # what starts later than j holds no cut before j
        stage = np.maximum(last[1 : j + 1, j], leaving[j])
        result[:rows, j] = np.min(np.maximum(fed[:rows, :j], stage[None, :]), axis=1)
    return result


def _unfold(
    levels: list[_Level], topology: Topology, k: int, i: int, j: int, device: int
) -> Iterator[tuple[int, int, list[int]]]:
    """First and last state and devices of each stage of the best pipeline on one component of level k.

    Replicas of a part that is itself a pipeline become replicas of each of its stages.
    """
    if k < 0:
        yield i, j, [device]
        return
    level, below = levels[k], topology.width(k - 1)
    stages, m = [], len(level.best)
    end = j
    while True:
        cut = _last_stage(level, i, end, m)
        start, replicas = (i, m) if cut is None else (cut[0] + 1, cut[1])
        if cut is not None and replicas == 0:  # a machine is left unused
            m -= 1
            continue
        stages.append((start, end, replicas))
        m -= replicas
        if cut is None:
            break
        end = cut[0]
    used = 0
    for start, end, replicas in reversed(stages):
        copies = [
            list(_unfold(levels, topology, k - 1, start, end, device + (used + c) * below))
            for c in range(replicas)
        ]
        used += replicas
        for parts in zip(*copies, strict=True):
            yield parts[0][0], parts[0][1], [d for part in parts for d in part[2]]


def _last_stage(level: _Level, i: int, j: int, m: int) -> tuple[int, int] | None:
    """Cut and replicas of the best last stage; None for a single stage, 0 replicas to use a machine less."""
    row = i if level.best[0].shape[0] > 1 else 0
    target = level.best[m - 1][row, j]
    if level.whole[m - 1][i, j] == target:
        return None
    for replicas in range(1, m):
        fed = np.maximum(level.best[m - replicas - 1][row], level.model.transfer_in(replicas))
        stage = np.maximum(level.model.last(replicas, m)[1:, j], level.model.transfer_out(replicas)[j])
        hits = np.flatnonzero(np.maximum(fed, stage) == target)
        if len(hits):
            return int(hits[0]), replicas
    return (j, 0)


def _plan(
    graph: ProfiledGraph,
    cut_at: Sequence[State],
    parts: list[tuple[int, int, list[int]]],
    limits: Limits,
    topology: Topology,
    time_s: float,
) -> Plan:
    workers = sum(len(devices) for _, _, devices in parts)
    rounds = lcm(*(len(devices) for _, _, devices in parts))
    left = workers
    stages, memory = [], []
    for n, (i, j, devices) in enumerate(parts):
        start = cut_at[i - 1].nodes if i else frozenset()
        inside = cut_at[j].nodes - start
        ids = _with_ends(graph, inside, first=n == 0)
        total = graph.total(inside)
        cost = StageCost(
            forward_s=total.forward_ms / 1e3,
            backward_s=total.backward_ms / 1e3,
            output_bytes=cut_at[j].boundary_bytes if j < len(cut_at) - 1 else 0.0,
            parameter_bytes=total.parameter_bytes,
            saved_bytes=total.saved_bytes,
            input_bytes=cut_at[i - 1].boundary_bytes if i else 0.0,
        )
        groups = tuple((d,) for d in devices)
        stages.append(Stage(ids, len(devices), graph.samples, devices=groups, cost=cost))
        memory.append(ceil(left / len(devices)) * (cost.parameter_bytes + cost.saved_bytes))
        left -= len(devices)
    in_flight = ceil(workers / stages[0].replicas)
    return Plan(
        model=graph.model.name,
        planner="pipedream",
        cost_model=limits.cost_model,
        stages=tuple(stages),
        edges=tuple((s, s + 1) for s in range(len(stages) - 1)),
        schedule="pipedream",
        weight_mode="stashing",
        micro_batches=ceil(4 * in_flight * stages[0].replicas / rounds) * rounds,
        in_flight=in_flight,
        predicted=Predicted(
            time_s, "micro-batch", tuple(memory), _data_parallel(cut_at, topology, limits.cost_model)
        ),
    )


def _with_ends(graph: ProfiledGraph, inside: frozenset[str], *, first: bool) -> tuple[str, ...]:
    """The nodes of a stage in the graph's order; inputs in the first, unread items beside their source."""
    kept = {node.id for node in without_ends(graph).model.nodes}
    readers = {a for a, _ in graph.model.edges}
    near = {b for a, b in graph.model.edges if a in inside}
    return tuple(
        node.id
        for node in graph.model.nodes
        if node.id in inside
        or (
            node.id not in kept
            and ((node.id not in readers and node.id in near) or (first and node.id in readers))
        )
    )


def _data_parallel(cut_at: Sequence[State], topology: Topology, name: str) -> float:
    """Time per micro-batch with the whole model on every device."""
    cuts = Cuts.of(cut_at[-1:])
    compute, within = cuts.seconds, 1
    for level in topology.levels:
        model = COST_MODELS[name](
            cuts, compute, machines=level.count, within=within, bandwidth=level.bandwidth
        )
        compute, within = model.alone(level.count), level.count
    return float(compute[0, 0])
