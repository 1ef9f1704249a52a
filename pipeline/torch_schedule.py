"""Programs on torch.distributed.pipelining: a schedule of torch's that runs what a `Program` says.

In:  a program that torch can express (`torch_text.to_torch`), and torch's `PipelineStage`s of this rank.
Out: a schedule of torch's, of which `step` runs one batch; or torch's opinion of the program.

All that this package uses of torch's private parts of pipelining is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
    _validate_schedule,
)

from pipeline.errors import ProgramError
from pipeline.program import Program
from pipeline.torch_text import to_torch


def torch_schedule(
    program: Program,
    stages: Sequence[PipelineStage],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    **options: Any,
) -> PipelineScheduleMulti:
    """A schedule whose `step` does what the program says on this rank; the update is the caller's.

    Args:
        program: One batch; see `torch_text.to_torch` for what torch can express.
        stages: This rank's stages.
        loss: As `loss_fn` of torch's schedules.
        options: More arguments of torch's schedules, such as `scale_grads`.

    Raises:
        ProgramError: torch can't express the program, or the stages are not those of the program.
    """
    rows = to_torch(program)
    layout = program.layout
    if not stages:
        raise ProgramError("a rank needs the stages that the program gives it; there are none.")
    rank = stages[0].group_rank
    given = sorted(stage.stage_index for stage in stages)
    if stages[0].num_stages != len(layout.stages) or given != list(layout.hosted(rank)):
        raise ProgramError(
            f"rank {rank} has stages {given} of {stages[0].num_stages}; the program gives it"
            f" {list(layout.hosted(rank))} of {len(layout.stages)}."
        )
    if any(isinstance(stage.submod, FSDPModule) for stage in stages):
        raise ProgramError(
            "a stage is sharded by FSDP, and the program does not say when torch gathers its parameters; use"
            " pipeline.runtime, or one of torch's own schedules."
        )
    schedule = _PipelineScheduleRuntime(list(stages), layout.micro_batches(0), loss_fn=loss, **options)
    schedule._prepare_schedule_with_comms(_actions(rows), format="compute_comms")
    return schedule


def check_with_torch(program: Program) -> None:
    """Have torch validate the order of the passes, and dry-run passes and messages.

    Raises:
        ProgramError: torch can't express the program, or finds it wrong.
    """
    layout = program.layout
    rows = [[text for text in row if "REDUCE" not in text] for row in to_torch(program)]
    count = len(layout.stages)
    try:
        owners = _validate_schedule(_actions(rows), layout.ranks, count, layout.micro_batches(0))
        _simulate_comms_compute(_actions(rows), owners.__getitem__, count)
    except (AssertionError, ValueError) as error:
        raise ProgramError(f"torch rejects the program: {error}") from error


def _actions(rows: Sequence[Sequence[str]]) -> dict[int, list[_Action | None]]:
    return {r: [_Action.from_str(text) for text in row] for r, row in enumerate(rows)}
