"""The same training in one process, without a pipeline: what a run has to equal.

In:  a program, of which only the layout and the weight version of each forward pass are read, and all stages.
Out: losses, and updated modules.

Versions are copies in a list, micro-batches go through all stages one after the other, gradients are added in
that order. Nothing of the runner is used, except that random numbers come from the same seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.func import functional_call

from pipeline.actions import Compute, Kind
from pipeline.program import Program
from pipeline.runtime.errors import RunError
from pipeline.runtime.randomness import seed_of, seeded
from pipeline.runtime.stage import StageModule
from pipeline.schedules.synchronous import topological

Weights = dict[str, torch.Tensor]


def run_in_one_process(
    program: Program,
    stages: Sequence[StageModule],
    data: Mapping[int, Sequence[torch.Tensor]],
    *,
    seed: int = 0,
    run: int = 0,
) -> dict[tuple[int, int], torch.Tensor]:
    """Losses by stage and micro-batch; the modules are trained.

    Args:
        program: What says which version of the weights each micro-batch sees, and when updates are.
        stages: All stages.
        data: For stages that read more than activations, tensors of all samples of the program.
        seed: As `Options.seed`.
        run: How many runs have been before.

    Raises:
        RunError: Stages use different micro-batch sizes and update more than once.
    """
    reference = _Reference(program, stages, data, seed, run)
    sizes = {stage.size for stage in program.layout.stages}
    if len(sizes) == 1:
        for k in range(program.layout.micro_batches(0)):
            reference.micro_batches([k], sizes.pop() if len(sizes) > 1 else 1)
        return reference.losses
    if any(stage.update != program.layout.samples for stage in program.layout.stages):
        raise RunError("with different micro-batch sizes, the reference makes one update, at the end.")
    reference.micro_batches(None, 1)
    return reference.losses
