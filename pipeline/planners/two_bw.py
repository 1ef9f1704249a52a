"""PipeDream-2BW's planner: parallel pipelines of equal stages, chosen by closed forms.

In:  a chain of blocks with its profile, a topology, and `Limits` with the batch.
Out: the `Plan` with the highest throughput that fits into memory; `predicted.time_s` is its time per batch.

Every data-parallel size, depth, micro-batch size and execution (no pipelining, 2BW, 2BW with recomputation)
is tried; there are few enough. With the same throughput, fewer devices, then fewer stages, then the larger
micro-batch win.

Source: PipeDream-2BW, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.errors import PlanError
from pipeline.graph import Cost, ProfiledGraph
from pipeline.passes.placement import Placement, pipeline_adjacent, standard
from pipeline.planners.blocks import Blocks, blocks_of, divisors
from pipeline.plans import Plan, Predicted, Stage, StageCost
from pipeline.topology import Topology

Execution = Literal["sequential", "2bw", "2bw-recompute"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner may do.

    Attributes:
        batch: Samples in a batch, the most that is known not to hurt convergence.
        recompute_factor: Computing time with recomputation over that without.
        profiles: Profiles at other micro-batch sizes than the graph's; without them, costs are in proportion.
    """

    batch: int
    recompute_factor: float = 4 / 3
    profiles: tuple[ProfiledGraph, ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the search space: d replicas of p stages, micro-batches of b samples, and how they run."""

    replicas: int
    stages: int
    micro_batch: int
    execution: Execution
    replicas_adjacent: bool

    @property
    def placement(self) -> Placement:
        """Devices by stage and replica."""
        place = standard if self.replicas_adjacent else pipeline_adjacent
        return place(self.stages, replicas=self.replicas)


def plan(graph: ProfiledGraph, topology: Topology, limits: Limits) -> Plan:
    """The plan with the highest throughput.

    Raises:
        PlanError: The model is no chain, or nothing fits into memory.
    """
    if limits.batch < 1:
        raise PlanError(f"a batch has {limits.batch} samples; at least 1 is needed.")
    blocks = blocks_of(graph, limits.profiles)
    fitting = [
        c
        for c in configurations(blocks, topology, limits)
        if topology.memory_bytes is None or max(memory(blocks, c)) <= topology.memory_bytes
    ]
    if not fitting:
        raise PlanError(
            f"{blocks.name}: no configuration of {topology.devices} devices fits into {topology.memory_bytes}"
            " bytes."
        )
    best = min(
        fitting,
        key=lambda c: (
            batch_time(blocks, topology, limits, c),
            c.replicas * c.stages,
            c.stages,
            -c.micro_batch,
        ),
    )
    return _plan(blocks, topology, limits, best)


def configurations(blocks: Blocks, topology: Topology, limits: Limits) -> Iterator[Configuration]:
    """All that can be run: equal stages, a whole number of micro-batches, and enough of them for 2BW."""
    for p in divisors(len(blocks.ids)):
        for d in range(1, topology.devices // p + 1):
            if limits.batch % d:
                continue
            for b in divisors(limits.batch // d):
                for execution in get_args(Execution):
                    if execution != "sequential" and limits.batch // (d * b) < p:
                        continue
                    for adjacent in (True, False):
                        yield Configuration(d, p, b, execution, adjacent)


def batch_time(blocks: Blocks, topology: Topology, limits: Limits, c: Configuration) -> float:
    """Seconds per batch: micro-batches of one pipeline times the time of one.

    Source: PipeDream-2BW, section 3.3.3, "Cost Function for THROUGHPUT".
    """
    m = limits.batch // (c.replicas * c.micro_batch)
    times = []
    for s, total in enumerate(_stages(blocks, c)):
        compute = (total.forward_ms + total.backward_ms) / 1e3
        if c.execution == "2bw-recompute":
            compute *= limits.recompute_factor
        synchronise = reduce_time(topology, c, s, total.parameter_bytes) / m
        times.append(max(compute + boundary_time(blocks, topology, c, s), synchronise))
    return m * (sum(times) if c.execution == "sequential" else max(times))


def boundary_time(blocks: Blocks, topology: Topology, c: Configuration, stage: int) -> float:
    """Seconds that a stage exchanges activations and gradients with the one before it, per micro-batch."""
    if stage == 0:
        return 0.0
    size = _boundary(blocks, c, stage)
    pairs = zip(c.placement[stage - 1], c.placement[stage], strict=True)
    return max(2 * size * topology.transfer(a[0], b[0])[1] for a, b in pairs)


def reduce_time(topology: Topology, c: Configuration, stage: int, parameter_bytes: float) -> float:
    """Seconds of one all-reduce of a stage's gradients over its replicas, in a ring."""
    devices = [group[0] for group in c.placement[stage]]
    d = len(devices)
    return 2 * (d - 1) / d * parameter_bytes * topology.ring_seconds_per_byte(devices)


def memory(blocks: Blocks, c: Configuration) -> tuple[float, ...]:
    """Bytes of one device of each stage.

    With equal blocks: 2|W|/p + A + p A_in for 2BW, A being p|A_total|/p without recomputation and |A_total|/p
    with it; |W|/p + |A_total|/p + A_in without pipelining.

    Source: PipeDream-2BW, section 3.3.3, "Cost Function for MEMORY".
    """
    p = c.stages
    versions = 1 if c.execution == "sequential" else 2
    in_flight = 1 if c.execution == "sequential" else p
    full = p if c.execution == "2bw" else 1
    return tuple(
        versions * total.parameter_bytes + full * total.saved_bytes + in_flight * _boundary(blocks, c, s)
        for s, total in enumerate(_stages(blocks, c))
    )


def _stages(blocks: Blocks, c: Configuration) -> list[Cost]:
    costs, length = blocks.costs(c.micro_batch), len(blocks.ids) // c.stages
    return [sum(costs[s * length : (s + 1) * length], Cost()) for s in range(c.stages)]


def _boundary(blocks: Blocks, c: Configuration, stage: int) -> float:
    """Bytes that come into a stage; the model's input is not counted."""
    length = len(blocks.ids) // c.stages
    return blocks.costs(c.micro_batch)[stage * length - 1].output_bytes if stage else 0.0


def _plan(blocks: Blocks, topology: Topology, limits: Limits, c: Configuration) -> Plan:
    length = len(blocks.ids) // c.stages
    stages = []
    for s, total in enumerate(_stages(blocks, c)):
        cost = StageCost(
            forward_s=total.forward_ms / 1e3,
            backward_s=total.backward_ms / 1e3,
            output_bytes=_boundary(blocks, c, s + 1) if s + 1 < c.stages else 0.0,
            parameter_bytes=total.parameter_bytes,
            saved_bytes=total.saved_bytes,
            input_bytes=_boundary(blocks, c, s),
        )
        recompute: Literal["stage", "none"] = "stage" if c.execution == "2bw-recompute" else "none"
        ids = blocks.ids[s * length : (s + 1) * length]
        stages.append(Stage(ids, c.replicas, c.micro_batch, 1, recompute, c.placement[s], cost))
    pipelined = c.execution != "sequential"
    return Plan(
        model=blocks.name,
        planner="2bw",
        cost_model="closed-form",
        stages=tuple(stages),
        edges=tuple((s, s + 1) for s in range(c.stages - 1)),
        schedule="2bw" if pipelined else "sequential",
        weight_mode="2bw" if pipelined else "flush",
        micro_batches=limits.batch // c.micro_batch,
        in_flight=c.stages if pipelined else 1,
        predicted=Predicted(batch_time(blocks, topology, limits, c), "batch", memory(blocks, c)),
    )
