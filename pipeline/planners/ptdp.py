"""PTD-P: pipeline, tensor and data parallelism of a transformer, found by search or by its authors' rules.

In:  the profile of a transformer (`transformer_profile`, or measured with the same nodes), a topology, and
     `Limits` with the shape and the batch.
Out: the `Plan` that is fastest among those that fit into memory; `predicted.time_s` is its time per batch.

`ptdp_model` says what a configuration costs.

Source: PTD-P, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import PlanError
from pipeline.graph import Cost, ProfiledGraph
from pipeline.planners.blocks import Blocks, blocks_of, divisors
from pipeline.planners.ptdp_model import (
    Configuration,
    Limits,
    batch_time,
    memory,
    repeated_share,
    sent_bytes,
    state_bytes,
    tensor_seconds,
    transfers_fit,
)
from pipeline.plans import Plan, Predicted, Schedule, Stage, StageCost
from pipeline.topology import Topology
from pipeline.transformer import ACTIVATION_BYTES, SHARDED_STATE_BYTES, boundary_bytes, layer_saved_bytes

__all__ = ["Configuration", "Limits", "by_the_rules", "configurations", "plan"]


def plan(graph: ProfiledGraph, topology: Topology, limits: Limits) -> Plan:
    """The fastest configuration that fits into memory, on all devices.

    Raises:
        PlanError: The profile is of another model, or nothing fits.
    """
    blocks = _blocks(graph, limits)
    fitting = _fitting(blocks, topology, limits)
    best = min(fitting, key=lambda c: batch_time(blocks, topology, limits, c))
    return _plan(blocks, topology, limits, best)


def by_the_rules(graph: ProfiledGraph, topology: Topology, limits: Limits) -> Plan:
    """The configuration that the published takeaways lead to.

    1. Tensor parallelism up to the size of a server before pipeline parallelism across servers.
    2. Model parallelism no larger than memory asks for, data parallelism for the rest.
    3. The micro-batch size by the time that the model predicts.

    Source: PTD-P, sections 4.3.2 to 4.3.4.
    """
    blocks = _blocks(graph, limits)
    fitting = _fitting(blocks, topology, limits)
    smallest = min(c.pipeline * c.tensor for c in fitting)
    candidates = [c for c in fitting if c.pipeline * c.tensor == smallest]
    widest = max(c.tensor for c in candidates)
    candidates = [c for c in candidates if c.tensor == widest]
    best = min(candidates, key=lambda c: batch_time(blocks, topology, limits, c))
    return _plan(blocks, topology, limits, best)


def configurations(topology: Topology, limits: Limits) -> Iterator[Configuration]:
    """All that can be run: p t d = n, t within a server and dividing the heads, p v dividing the layers."""
    n, model = topology.devices, limits.model
    for t in divisors(topology.levels[0].count):
        if model.heads % t or n % t:
            continue
        for p in divisors(n // t):
            d = n // t // p
            if limits.batch % d:
                continue
            for b in limits.micro_batches or divisors(limits.batch // d):
                if limits.batch // d % b:
                    continue
                for v in limits.chunks:
                    if model.layers % (p * v) or (v > 1 and (p == 1 or (limits.batch // d // b) % p)):
                        continue
                    for recompute in limits.recompute:
                        yield Configuration(p, t, d, b, v, recompute)
                        if limits.bpipe and v == 1 and p >= 4:  # with fewer, 1F1B is as balanced
                            yield Configuration(p, t, d, b, v, recompute, bpipe=True)


def _fitting(blocks: Blocks, topology: Topology, limits: Limits) -> list[Configuration]:
    """The configurations that fit into memory, and whose transfers hide behind computation."""
    fitting = [
        c
        for c in configurations(topology, limits)
        if (topology.memory_bytes is None or max(memory(limits, c)) <= topology.memory_bytes)
        and (not c.bpipe or transfers_fit(blocks, topology, limits, c))
    ]
    if not fitting:
        raise PlanError(
            f"{limits.model.name}: no configuration of {topology.devices} devices fits into"
            f" {topology.memory_bytes} bytes with a batch of {limits.batch}."
        )
    return fitting


def _blocks(graph: ProfiledGraph, limits: Limits) -> Blocks:
    if limits.cost_model not in ("paper", "communication"):
        raise PlanError(f"cost model {limits.cost_model!r}; one of paper, communication.")
    least = ACTIVATION_BYTES + (SHARDED_STATE_BYTES if limits.shard_optimizer else 0)
    if limits.state_bytes < least:
        raise PlanError(
            f"a parameter has {limits.state_bytes} bytes of state; weight and sharded optimizer need {least}."
        )
    if limits.batch < 1:
        raise PlanError(f"a batch has {limits.batch} samples; at least 1 is needed.")
    blocks = blocks_of(graph, limits.profiles)
    if len(blocks.ids) != limits.model.layers + 2:
        raise PlanError(
            f"{blocks.name} has {len(blocks.ids)} nodes; embedding, {limits.model.layers} layers and head are"
            " needed."
        )
    return blocks


def _plan(blocks: Blocks, topology: Topology, limits: Limits, c: Configuration) -> Plan:
    first, *layers, last = blocks.ids
    count = c.pipeline * c.chunks
    length = len(layers) // count
    costs = blocks.costs(c.micro_batch)
    saved = layer_saved_bytes(limits.model, c.micro_batch, tensor_parallel=c.tensor, recompute=c.recompute)
    again = repeated_share(limits.model, c.recompute)
    tensor = length * tensor_seconds(topology, limits, c)
    stages = []
    for s in range(count):
        ids = layers[s * length : (s + 1) * length]
        ids = [*([first] if s == 0 else []), *ids, *([last] if s == count - 1 else [])]
        total = sum((costs[blocks.ids.index(i)] for i in ids), Cost())
        cost = StageCost(
            forward_s=total.forward_ms / 1e3 / c.tensor + tensor,
            backward_s=(total.backward_ms + again * total.forward_ms) / 1e3 / c.tensor
            + (2 if c.recompute == "layer" else 1) * tensor,
            output_bytes=sent_bytes(limits, c) if s < count - 1 else 0.0,
            parameter_bytes=total.parameter_bytes / c.tensor,
            saved_bytes=length * saved,
            input_bytes=boundary_bytes(limits.model, c.micro_batch) if s else 0.0,
            state_bytes=(state_bytes(limits, c) / ACTIVATION_BYTES - 1) * total.parameter_bytes / c.tensor,
        )
        stages.append(
            Stage(tuple(ids), c.data, c.micro_batch, c.tensor, c.recompute, c.placement[s % c.pipeline], cost)
        )
    m = c.micro_batches(limits.batch)
    ahead = c.pipeline if c.chunks == 1 else 2 * (c.pipeline - 1) + (c.chunks - 1) * c.pipeline + 1
    schedule: Schedule = "interleaved" if c.chunks > 1 else "bpipe" if c.bpipe else "1f1b"
    return Plan(
        model=limits.model.name,
        planner="ptdp",
        cost_model=limits.cost_model,
        stages=tuple(stages),
        edges=tuple((s, s + 1) for s in range(count - 1)),
        schedule=schedule,
        weight_mode="flush",
        micro_batches=m * c.data,
        in_flight=min(ahead, m * c.chunks),
        virtual_stages=c.chunks,
        predicted=Predicted(batch_time(blocks, topology, limits, c), "batch", memory(limits, c)),
    )
