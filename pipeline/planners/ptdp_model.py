"""PTD-P's analytic model: time and memory of one way to spread a transformer over devices.

In:  the blocks of the model, a topology, `Limits` and a `Configuration`.
Out: `batch_time` in seconds, `memory` in bytes of each pipeline rank.

Symbols: p pipeline, t tensor and d data-parallel size, b micro-batch, m micro-batches of one pipeline,
v chunks a device. `cost_model="paper"` counts computation and bubble only, (m + (p-1)/v)(tf + tb);
`communication` adds what tensor, pipeline and data parallelism send.

Source: PTD-P, section 4.3; BPipe, sections 3.3 and 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pipeline.graph import Cost, ProfiledGraph
from pipeline.passes.placement import Placement, pair_adjacent, standard
from pipeline.passes.transfers import balanced_capacity
from pipeline.planners.blocks import Blocks
from pipeline.plans import Recompute
from pipeline.topology import Topology
from pipeline.transformer import (
    SHARDED_STATE_BYTES,
    STATE_BYTES,
    Transformer,
    boundary_bytes,
    layer_parameters,
    layer_saved_bytes,
    stage_saved_bytes,
    transfer_bandwidth,
)


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
        bpipe: Also try BPipe, which lets early ranks move what they saved to late ones.
        state_bytes: Bytes a parameter: weight, gradient and optimizer state; see `transformer.STATE_BYTES`.
        shard_optimizer: Spread `transformer.SHARDED_STATE_BYTES` of them over data-parallel replicas.
    """

    model: Transformer
    batch: int
    cost_model: str = "communication"
    chunks: tuple[int, ...] = (1, 2, 4)
    recompute: tuple[Recompute, ...] = ("none", "attention", "layer")
    micro_batches: tuple[int, ...] | None = None
    profiles: tuple[ProfiledGraph, ...] = ()
    scatter_gather: bool = True
    bpipe: bool = False
    state_bytes: float = STATE_BYTES
    shard_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the search space: p, t, d, b, v, what is recomputed, and whether BPipe balances memory."""

    pipeline: int
    tensor: int
    data: int
    micro_batch: int
    chunks: int
    recompute: Recompute
    bpipe: bool = False

    @property
    def placement(self) -> Placement:
        """Devices by pipeline rank and replica."""
        place = pair_adjacent if self.bpipe else standard
        return place(self.pipeline, replicas=self.data, tensor_parallel=self.tensor)

    def micro_batches(self, batch: int) -> int:
        """Micro-batches m of one pipeline in a batch."""
        return batch // (self.data * self.micro_batch)


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

    What is recomputed exists in full during the backward pass of one layer.
    """
    model, p, v = limits.model, c.pipeline, c.chunks
    m = c.micro_batches(limits.batch)
    per_rank = model.layers // p
    saved = layer_saved_bytes(model, c.micro_batch, tensor_parallel=c.tensor, recompute=c.recompute)
    whole = layer_saved_bytes(model, c.micro_batch, tensor_parallel=c.tensor)
    working = whole if c.recompute == "layer" else whole - saved
    layer = layer_parameters(model)
    result = []
    for r in range(p):
        ends = (model.vocabulary + model.sequence) * (r == 0) + model.vocabulary * (r == p - 1 and p > 1)
        state = state_bytes(limits, c) * (per_rank * layer + ends * model.hidden) / c.tensor
        result.append(state + chunks_held(c, m, r) * (per_rank / v) * saved + working)
    return tuple(result)


def state_bytes(limits: Limits, c: Configuration) -> float:
    """Bytes a parameter that one device holds: weight, gradient and its share of the optimizer state.

    Sharded, that share is a d-th (ZeRO stage 1).

    Source: BPipe, sections 1 and 4.2.
    """
    elsewhere = SHARDED_STATE_BYTES * (1 - 1 / c.data) if limits.shard_optimizer else 0.0
    return limits.state_bytes - elsewhere


def chunks_held(c: Configuration, micro_batches: int, rank: int) -> int:
    """The most micro-batches of a chunk that a rank saves at a time.

    With BPipe an evictor keeps to the balanced number; its acceptor has its own and what has been moved
    there, one of them in transit.
    """
    p, v, m = c.pipeline, c.chunks, micro_batches
    if v > 1:
        return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v)
    own, others = min(p - rank, m), min(rank + 1, m)
    if not c.bpipe:
        return own
    capacity = balanced_capacity(p)
    if own > capacity:
        return capacity
    return own + (others - capacity + 1 if others > capacity else 0)


def transfers_fit(blocks: Blocks, topology: Topology, limits: Limits, c: Configuration) -> bool:
    """Whether a transfer of what a rank saved takes no longer than its forward pass.

    Source: BPipe, section 3.5 and equations 7 to 9.
    """
    size = stage_saved_bytes(
        limits.model, c.micro_batch, c.pipeline, tensor_parallel=c.tensor, recompute=c.recompute
    )
    forward = min(cost.forward_ms for cost in _rank_costs(blocks, c)) / 1e3 / c.tensor
    slowest = max(
        topology.transfer(a[0], b[0])[1]
        for s in range(c.pipeline // 2)
        for a, b in zip(c.placement[s], c.placement[c.pipeline - 1 - s], strict=True)
    )
    return forward > 0 and transfer_bandwidth(size, forward) * slowest <= 1


def _stage_seconds(
    blocks: Blocks, topology: Topology, limits: Limits, c: Configuration
) -> list[tuple[float, float]]:
    """Forward and backward seconds of each pipeline rank for one micro-batch, over all of its chunks."""
    model = limits.model
    tensor, boundary = tensor_seconds(topology, limits, c), 0.0
    if limits.cost_model == "communication" and c.pipeline > 1:
        boundary = sent_bytes(limits, c) * max(
            topology.transfer(a[0], b[0])[1]
            for before, after in pairwise(c.placement)
            for a, b in zip(before, after, strict=True)
        )
    result = []
    for cost in _rank_costs(blocks, c):
        forward = cost.forward_ms / 1e3 / c.tensor
        backward = cost.backward_ms / 1e3 / c.tensor
        backward += forward * repeated_share(model, c.recompute)
        layers = model.layers // c.pipeline
        sent = boundary * c.chunks
        repeated = 1 if c.recompute == "layer" else 0
        result.append((forward + layers * tensor + sent, backward + (1 + repeated) * layers * tensor + sent))
    return result


def tensor_seconds(topology: Topology, limits: Limits, c: Configuration) -> float:
    """Seconds of tensor parallelism's all-reduces, a layer and direction; none in the cost model `paper`.

    Two of the activation each: with backward 8 b s h (t-1)/t numbers a layer.

    Source: PTD-P, section 4.3.2.
    """
    if limits.cost_model == "paper":
        return 0.0
    size = boundary_bytes(limits.model, c.micro_batch)
    return 4 * size * (c.tensor - 1) / c.tensor / topology.levels[0].bandwidth


def sent_bytes(limits: Limits, c: Configuration) -> float:
    """Bytes that one device sends to the next stage for a micro-batch: b s h numbers, or a t-th of them.

    Source: PTD-P, section 4.4.1.
    """
    size = boundary_bytes(limits.model, c.micro_batch)
    return size / c.tensor if limits.scatter_gather else size


def repeated_share(model: Transformer, recompute: Recompute) -> float:
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
    seconds = []
    for cost, groups in zip(_rank_costs(blocks, c), c.placement, strict=True):
        slowest = topology.ring_seconds_per_byte([group[0] for group in groups])
        seconds.append(2 * (c.data - 1) / c.data * cost.parameter_bytes / c.tensor * slowest)
    return max(seconds)
