"""PTD-P: pipeline, tensor and data parallelism of a transformer, found by search or by its authors' rules.

In:  the profile of a transformer (`transformer_profile`, or measured with the same nodes), a topology, and
     `Limits` with the shape and the batch.
Out: the `Plan` that is fastest among those that fit into memory; `predicted.time_s` is its time per batch.

Symbols: p pipeline, t tensor and d data-parallel size, b micro-batch, m micro-batches of one pipeline, v
chunks a device. `cost_model="paper"` counts computation and bubble only, (m + (p-1)/v)(tf + tb);
`communication` adds what tensor, pipeline and data parallelism send.

Source: PTD-P, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pipeline.errors import PlanError
from pipeline.graph import Cost, ProfiledGraph
from pipeline.passes.placement import standard
from pipeline.planners.blocks import Blocks, blocks_of, divisors
from pipeline.plans import Plan, Predicted, Recompute, Stage, StageCost
from pipeline.topology import Topology
from pipeline.transformer import STATE_BYTES, Transformer, boundary_bytes, layer_parameters, layer_saved_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What the search may do.

    Attributes:
        model: The shape of the transformer.
        batch: Samples in a batch.
        cost_model: `paper` or `communication`.
        chunks: Numbers of chunks a device to try.
        recompute: What may be recomputed, in the order of preference when times are equal.
        micro_batches: Micro-batch sizes to try; None: all that divide the batch.
        profiles: Profiles at other micro-batch sizes than the graph's; without them, costs are in proportion.
        scatter_gather: Send each t-th part of an activation between stages and gather it there.
    """

    model: Transformer
    batch: int
    cost_model: str = "communication"
    chunks: tuple[int, ...] = (1, 2, 4)
    recompute: tuple[Recompute, ...] = ("none", "attention", "layer")
    micro_batches: tuple[int, ...] | None = None
    profiles: tuple[ProfiledGraph, ...] = ()
    scatter_gather: bool = True


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the search space."""

    pipeline: int
    tensor: int
    data: int
    micro_batch: int
    chunks: int
    recompute: Recompute

    def micro_batches(self, batch: int) -> int:
        """Micro-batches m of one pipeline in a batch."""
        return batch // (self.data * self.micro_batch)


def plan(graph: ProfiledGraph, topology: Topology, limits: Limits) -> Plan:
    """The fastest configuration that fits into memory, on all devices.

    Raises:
        PlanError: The profile is of another model, or nothing fits.
    """
    blocks = _blocks(graph, limits)
    fitting = [c for c in configurations(topology, limits) if _fits(topology, limits, c)]
    if not fitting:
        raise PlanError(
            f"{limits.model.name}: no configuration of {topology.devices} devices fits into"
            f" {topology.memory_bytes} bytes with a batch of {limits.batch}."
        )
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
    fitting = [c for c in configurations(topology, limits) if _fits(topology, limits, c)]
    if not fitting:
        raise PlanError(f"{limits.model.name}: nothing fits into {topology.memory_bytes} bytes.")
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


def batch_time(blocks: Blocks, topology: Topology, limits: Limits, c: Configuration) -> float:
    """Seconds per batch.

    The slowest stage sets the pace; its time counts for each micro-batch and in the bubble.

    Source: PTD-P, equation 4.1 and section 4.2.2 for the bubble of chunks.
    """
    pace = max(forward + backward for forward, backward in _stage_seconds(blocks, topology, limits, c))
    time = (c.micro_batches(limits.batch) + (c.pipeline - 1) / c.chunks) * pace
    if limits.cost_model == "communication":
        time += _reduce_seconds(blocks, topology, c)
    return time


def memory(limits: Limits, c: Configuration) -> tuple[float, ...]:
    """Bytes of one device of each pipeline rank: state of its parameters, and what is saved in flight.

    With layers recomputed, one layer's activations exist in full during its backward pass.
    """
    model, p, v = limits.model, c.pipeline, c.chunks
    m = c.micro_batches(limits.batch)
    per_rank = model.layers // p
    saved = layer_saved_bytes(model, c.micro_batch, tensor_parallel=c.tensor, recompute=c.recompute)
    working = 0.0
    if c.recompute == "layer":
        working = layer_saved_bytes(model, c.micro_batch, tensor_parallel=c.tensor)
    layer = layer_parameters(model)
    result = []
    for r in range(p):
        ends = (model.vocabulary + model.sequence) * (r == 0) + model.vocabulary * (r == p - 1 and p > 1)
        state = STATE_BYTES * (per_rank * layer + ends * model.hidden) / c.tensor
        chunks = min(p - r, m) if v == 1 else min(2 * (p - r - 1) + (v - 1) * p + 1, m * v)
        result.append(state + chunks * (per_rank / v) * saved + working)
    return tuple(result)


def _fits(topology: Topology, limits: Limits, c: Configuration) -> bool:
    return topology.memory_bytes is None or max(memory(limits, c)) <= topology.memory_bytes


def _blocks(graph: ProfiledGraph, limits: Limits) -> Blocks:
    if limits.cost_model not in ("paper", "communication"):
        raise PlanError(f"cost model {limits.cost_model!r}; one of paper, communication.")
    if limits.batch < 1:
        raise PlanError(f"a batch has {limits.batch} samples; at least 1 is needed.")
    blocks = blocks_of(graph, limits.profiles)
    if len(blocks.ids) != limits.model.layers + 2:
        raise PlanError(
            f"{blocks.name} has {len(blocks.ids)} nodes; embedding, {limits.model.layers} layers and head are"
            " needed."
        )
    return blocks


def _stage_seconds(
    blocks: Blocks, topology: Topology, limits: Limits, c: Configuration
) -> list[tuple[float, float]]:
    """Forward and backward seconds of each pipeline rank for one micro-batch, over all of its chunks."""
    model = limits.model
    tensor = boundary = 0.0
    if limits.cost_model == "communication":
        size = boundary_bytes(model, c.micro_batch)
        if c.tensor > 1:
            # Two all-reduces of the activation a layer and direction; together with backward 8 b s h (t-1)/t.
            tensor = 4 * size * (c.tensor - 1) / c.tensor / topology.levels[0].bandwidth
        if c.pipeline > 1:
            sent = size / c.tensor if limits.scatter_gather else size
            groups = standard(c.pipeline, replicas=c.data, tensor_parallel=c.tensor)
            boundary = sent * max(
                topology.transfer(a[0], b[0])[1]
                for before, after in pairwise(groups)
                for a, b in zip(before, after, strict=True)
            )
    result = []
    for cost in _rank_costs(blocks, c):
        forward = cost.forward_ms / 1e3 / c.tensor
        backward = cost.backward_ms / 1e3 / c.tensor
        backward += forward * _repeated(model, c.recompute)
        layers = model.layers // c.pipeline
        sent = boundary * c.chunks
        repeated = 1 if c.recompute == "layer" else 0
        result.append((forward + layers * tensor + sent, backward + (1 + repeated) * layers * tensor + sent))
    return result


def _repeated(model: Transformer, recompute: Recompute) -> float:
    """Share of the forward pass that is run again: all of it, or the attention's 4 b s^2 h operations."""
    s, h = model.sequence, model.hidden
    return {"none": 0.0, "attention": 4 * s / (24 * h + 4 * s), "layer": 1.0, "stage": 1.0}[recompute]


def _rank_costs(blocks: Blocks, c: Configuration) -> list[Cost]:
    """What each pipeline rank computes: its layers, the first also the embedding, the last also the head."""
    first, *layers, last = blocks.costs(c.micro_batch)
    p, v = c.pipeline, c.chunks
    length = len(layers) // (p * v)
    totals = []
    for r in range(p):
        mine = [x for k in range(v) for x in layers[(k * p + r) * length : (k * p + r + 1) * length]]
        totals.append(sum([*([first] if r == 0 else []), *mine, *([last] if r == p - 1 else [])], Cost()))
    return totals


def _reduce_seconds(blocks: Blocks, topology: Topology, c: Configuration) -> float:
    """Seconds of the all-reduce of gradients over data-parallel replicas, in a ring, once a batch."""
    placement = standard(c.pipeline, replicas=c.data, tensor_parallel=c.tensor)
    seconds = []
    for cost, groups in zip(_rank_costs(blocks, c), placement, strict=True):
        slowest = topology.ring_seconds_per_byte([group[0] for group in groups])
        seconds.append(2 * (c.data - 1) / c.data * cost.parameter_bytes / c.tensor * slowest)
    return max(seconds)


def _plan(blocks: Blocks, topology: Topology, limits: Limits, c: Configuration) -> Plan:
    placement = standard(c.pipeline, replicas=c.data, tensor_parallel=c.tensor)
    first, *layers, last = blocks.ids
    count = c.pipeline * c.chunks
    length = len(layers) // count
    costs = blocks.costs(c.micro_batch)
    boundary = boundary_bytes(limits.model, c.micro_batch)
    saved = layer_saved_bytes(limits.model, c.micro_batch, tensor_parallel=c.tensor, recompute=c.recompute)
    again = _repeated(limits.model, c.recompute)
    stages = []
    for s in range(count):
        ids = layers[s * length : (s + 1) * length]
        ids = [*([first] if s == 0 else []), *ids, *([last] if s == count - 1 else [])]
        total = sum((costs[blocks.ids.index(i)] for i in ids), Cost())
        cost = StageCost(
            forward_s=total.forward_ms / 1e3 / c.tensor,
            backward_s=(total.backward_ms + again * total.forward_ms) / 1e3 / c.tensor,
            output_bytes=boundary if s < count - 1 else 0.0,
            parameter_bytes=total.parameter_bytes / c.tensor,
            saved_bytes=length * saved,
            input_bytes=boundary if s else 0.0,
        )
        stages.append(
            Stage(tuple(ids), c.data, c.micro_batch, c.tensor, c.recompute, placement[s % c.pipeline], cost)
        )
    m = c.micro_batches(limits.batch)
    ahead = c.pipeline if c.chunks == 1 else 2 * (c.pipeline - 1) + (c.chunks - 1) * c.pipeline + 1
    return Plan(
        model=limits.model.name,
        planner="ptdp",
        cost_model=limits.cost_model,
        stages=tuple(stages),
        edges=tuple((s, s + 1) for s in range(count - 1)),
        schedule="1f1b" if c.chunks == 1 else "interleaved",
        weight_mode="flush",
        micro_batches=m * c.data,
        in_flight=min(ahead, m * c.chunks),
        virtual_stages=c.chunks,
        predicted=Predicted(batch_time(blocks, topology, limits, c), "batch", memory(limits, c)),
    )
