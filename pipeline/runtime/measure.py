"""What stages cost, measured as the runtime runs them, one stage after the other in this process.

In:  stages, the layout of a program, and its data.
Out: a `StageCost` for each stage, with seconds and bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Any

import torch

from pipeline.plans import StageCost
from pipeline.program import Layout
from pipeline.runtime.randomness import seeded
from pipeline.runtime.stage import StageModule, StageRunner, Tensors
from pipeline.runtime.weights import Weights
from pipeline.schedules.synchronous import topological


def measure(
    layout: Layout,
    stages: Sequence[StageModule],
    data: Mapping[int, Sequence[torch.Tensor]],
    *,
    repeat: int = 5,
) -> tuple[StageCost, ...]:
    """Costs of each stage for one of its micro-batches; gradients that this leaves are cleared.

    Args:
        layout: The stages.
        stages: Their modules.
        data: As for `Runner.run`.
        repeat: How often each pass is run; the median counts.
    """
    costs: dict[int, StageCost] = {}
    made: dict[int, Tensors] = {}
    for s in topological(layout):
        size = layout.stages[s].size
        inputs = tuple(
            torch.zeros((size, *t.shape[1:]), dtype=t.dtype) for p in layout.predecessors[s] for t in made[p]
        )
        own = tuple(t[:size] for t in data.get(s, ()))
        runner = StageRunner(Weights(stages[s].module, None), _random, torch.device("cpu"))
        made[s], cost = _measure(runner, inputs, own, repeat)
        costs[s] = cost
        stages[s].module.zero_grad()
    return tuple(cost for _, cost in sorted(costs.items()))


def _measure(runner: StageRunner, inputs: Tensors, data: Tensors, repeat: int) -> tuple[Tensors, StageCost]:
    outputs, saved = runner.trial(inputs, data)
    ones = tuple(torch.ones_like(t) for t in outputs if t.is_floating_point())
    forward = partial(runner.forward, 0, inputs, data, 0, again=False)
    times: dict[str, list[float]] = {"F": [], "B": [], "BI": [], "BW": []}
    for _ in range(repeat):
        times["F"].append(_seconds(forward))
        times["B"].append(_seconds(partial(runner.backward, 0, ones)))
        forward()
        times["BI"].append(_seconds(partial(runner.backward_input, 0, ones)))
        times["BW"].append(_seconds(partial(runner.backward_weight, 0)))
    parts = median(times["BI"]), median(times["BW"])
    return outputs, StageCost(
        forward_s=median(times["F"]),
        backward_s=median(times["B"]),
        output_bytes=float(sum(t.nbytes for t in outputs)),
        parameter_bytes=float(runner.weights.nbytes),
        saved_bytes=float(sum(saved)),
        input_bytes=float(sum(t.nbytes for t in inputs)),
        input_fraction=parts[0] / sum(parts) if sum(parts) else 0.5,
    )


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _random(micro_batch: int) -> AbstractContextManager[None]:
    return seeded(micro_batch)
