"""What BPipe's authors ran, and models of its memory and time with as few constants as they leave open.

Source: BPipe, Tables 1 to 4, 6 and 7 (4.1 to 4.5 and 4.7 in the dissertation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.planners.ptdp import Configuration, Limits
from pipeline.planners.ptdp_model import memory
from pipeline.plans import Plan, Predicted, Stage, StageCost
from pipeline.simulator import Result, simulate_plan
from pipeline.topology import Level, Topology
from pipeline.transformer import (
    GPT3_96B,
    GPT3_134B,
    Transformer,
    boundary_bytes,
    head_forward_flops,
    layer_parameters,
    stage_saved_bytes,
)

GIB = 2**30
MODELS = {"96B": (GPT3_96B, 32, 128), "134B": (GPT3_134B, 48, 192)}
"""Shape, devices and batch."""

# Tensor and pipeline size; for each micro-batch size the least recomputation that runs and its MFU in per
# cent. A star: with BPipe only. Sizes that are not listed don't run at all.
TABLE = {
    "96B": """
        1 16  1 layer 38.08
        2 8   1 layer 40.46       2 layer 30.29
        4 4   1 attention 37.59   2 layer 40.51
        8 2   1 attention 35.47   2 layer 30.07        4 layer 38.08
        2 16  1 attention* 48.78  2 layer 36.78        4 layer 29.79
        4 8   1 attention 37.09   2 attention* 50.64   4 layer 36.23  8 layer 25.74
        8 4   1 attention 36.18   2 attention 36.56    4 layer 38.04  8 layer 24.31
        """,
    "134B": """
        2 12  1 layer 39.98       2 layer 38.64
        4 6   1 attention 39.90   2 layer 41.40        4 layer 30.06
        8 3   1 attention 37.77   2 layer 31.76        4 layer 38.81
        4 12  1 attention 39.19   2 attention* 52.06   4 layer 37.22
        8 6   1 attention 38.45   2 attention 38.72    4 layer 38.72  8 layer 24.01
        """,
}


@dataclass(frozen=True, slots=True)
class Run:
    """A configuration that was tried; `mfu` in per cent, None where it ran out of memory."""

    model: str
    configuration: Configuration
    mfu: float | None

    def __str__(self) -> str:
        c = self.configuration
        scope = f"{c.recompute}{' BPipe' * c.bpipe}"
        return f"{self.model} t={c.tensor} p={c.pipeline} mb={c.micro_batch} {scope}"


def listed() -> list[Run]:
    """The rows of the tables."""
    runs = []
    for name, text in TABLE.items():
        for line in text.split("\n"):
            numbers = line.split()
            for b, scope, mfu in zip(numbers[2::3], numbers[3::3], numbers[4::3], strict=True):
                t, p = int(numbers[0]), int(numbers[1])
                d = MODELS[name][1] // (t * p)
                c = Configuration(p, t, d, int(b), 1, scope.rstrip("*"), bpipe="*" in scope)
                runs.append(Run(name, c, float(mfu)))
    return runs


def tried() -> Iterator[Run]:
    """The rows, and what the described search must have tried before without success.

    Recomputation goes from less to more and stops when something runs; BPipe is tried where that fails, on at
    least 4 stages, below which 1F1B is as balanced; micro-batches double until nothing runs.
    """
    rows = {(r.model, r.configuration.tensor, r.configuration.pipeline, r.configuration.micro_batch): r
            for r in listed()}  # fmt: skip
    for name, (model, devices, batch) in MODELS.items():
        for t in (1, 2, 4, 8):
            for p in (p for p in range(1, devices + 1) if devices % (t * p) == 0 == model.layers % p):
                d, b = devices // (t * p), 1
                runs = True
                while runs and batch % (b * d) == 0:
                    base = Configuration(p, t, d, b, 1, "none")
                    attention = replace(base, recompute="attention")
                    layer = replace(base, recompute="layer")
                    row = rows.get((name, t, p, b))
                    runs = row is not None
                    if row is not None:
                        yield row
                    if row is not None and row.configuration == attention:
                        yield Run(name, base, None)
                        b *= 2
                        continue
                    yield Run(name, attention, None)
                    if p >= 4 and (row is None or not row.configuration.bpipe):
                        yield Run(name, replace(attention, bpipe=True), None)
                    if row is None:
                        yield Run(name, layer, None)
                    b *= 2


STATE = 18
"""Bytes a parameter: weight in 2, gradient in 4, weight and two moments in 4 bytes each; the last three are
sharded. The 13B model says so: its stages differ by 37 GiB and the last one uses about half of a device."""


def needed_gib(run: Run, state: float = STATE) -> float:
    """GiB that the fullest device needs, as the planner counts."""
    model, _, batch = MODELS[run.model]
    limits = Limits(model, batch, state_bytes=state, shard_optimizer=True)
    return max(memory(limits, run.configuration)) / GIB


@dataclass(frozen=True, slots=True)
class Speeds:
    """The constants of the model of time.

    Attributes:
        flops: Of matrix products, a second.
        bandwidth: Bytes a second between two devices of a server.
        head_s: Seconds of one head's attention in one layer, for one sample.
        unfused: How much longer that takes without the fused softmax kernel.
    """

    flops: float = 230e12
    bandwidth: float = 230e9
    head_s: float = 9.45e-3 / (5 * 40)
    unfused: float = 1.0


PEAK = 312e12
"""Operations per second of the device, A100."""


def fused(model: Transformer, c: Configuration) -> bool:
    """Whether Megatron-LM's softmax kernel takes the shape: heads times samples on a device, in fours."""
    return model.heads // c.tensor * c.micro_batch % 4 == 0


def simulated(name: str, c: Configuration, speeds: Speeds) -> Result:
    """One batch in the simulator."""
    return simulate_plan(plan_of(name, c, speeds), topology_of(name))


def mfu(name: str, c: Configuration, result: Result) -> float:
    """Model FLOPs utilization in per cent."""
    model, devices, batch = MODELS[name]
    s, h, V = model.sequence, model.hidden, model.vocabulary
    operations = 72 * batch * s * model.layers * h * h * (1 + s / (6 * h) + V / (12 * model.layers * h))
    return 100 * operations / (result.makespan_s * devices * PEAK)


def topology_of(name: str) -> Topology:
    """Servers of 8 with 230 GB/s between two devices, and 100 GB/s out of a server."""
    return Topology((Level(8, 230e9), Level(MODELS[name][1] // 8, 12.5e9)))


def plan_of(name: str, c: Configuration, speeds: Speeds) -> Plan:
    """The configuration as a plan whose stages cost what `speeds` make of them."""
    model, _, batch = MODELS[name]
    stages = []
    for s in range(c.pipeline):
        head = head_forward_flops(model, c.micro_batch) if s == c.pipeline - 1 else 0.0
        layers = model.layers // c.pipeline
        cost = _cost(model, c, speeds, layers, head)
        cost = replace(
            cost,
            output_bytes=boundary_bytes(model, c.micro_batch) / c.tensor if s < c.pipeline - 1 else 0.0,
            parameter_bytes=2.0 * layers * layer_parameters(model) / c.tensor,
            saved_bytes=stage_saved_bytes(
                model, c.micro_batch, c.pipeline, tensor_parallel=c.tensor, recompute=c.recompute
            ),
        )
        nodes = (f"stage{s}",)
        stages.append(Stage(nodes, c.data, c.micro_batch, c.tensor, c.recompute, c.placement[s], cost))
    m = c.micro_batches(batch)
    return Plan(
        name, "published", "published", tuple(stages), tuple((s, s + 1) for s in range(c.pipeline - 1)),
        "bpipe" if c.bpipe else "1f1b", "flush", m * c.data, min(c.pipeline, m), Predicted(0.0, "batch"),
    )  # fmt: skip


def _cost(model: Transformer, c: Configuration, speeds: Speeds, layers: int, head: float) -> StageCost:
    s, h, b, t = model.sequence, model.hidden, c.micro_batch, c.tensor
    products = (layers * 24.0 * b * s * h * h + head) / t / speeds.flops
    attention = layers * model.heads * b / t * speeds.head_s * (1.0 if fused(model, c) else speeds.unfused)
    exchange = layers * 4 * boundary_bytes(model, b) * (t - 1) / t / speeds.bandwidth
    again = {"none": 0.0, "attention": attention, "layer": products + attention + exchange}[c.recompute]
    forward = products + attention + exchange
    return StageCost(forward, 2 * (products + attention) + exchange + again)
