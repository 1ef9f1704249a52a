"""What sharded stages can't do, found before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.actions import Action, Compute, Kind, Weights
from pipeline.runtime.errors import RunError
from pipeline.runtime.stage import StageModule

_PARTS = frozenset({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})


def refuse_impossible(actions: Sequence[Action], stages: Mapping[int, StageModule]) -> None:
    """Check the stages of a rank against what its program does with them.

    Raises:
        RunError: FSDP and a backward pass in two parts, or distributed parameters and stashed weights.
    """
    split = {a.stage for a in actions if isinstance(a, Compute) and a.kind in _PARTS}
    stashed = {a.stage for a in actions if isinstance(a, Weights) and a.kind is Kind.STASH}
    for s, stage in stages.items():
        modules = list(stage.module.modules())
        if s in split and any(isinstance(module, FSDPModule) for module in modules):
            raise RunError(
                f"stage {s} is sharded by FSDP, which reduces gradients in whole backward passes, and the"
                " program splits them. Use a schedule that doesn't, such as 1f1b."
            )
        if s in stashed and any(isinstance(p, DTensor) for p in stage.module.parameters()):
            raise RunError(
                f"stage {s} has distributed parameters (FSDP or DTensor), whose old versions can't be kept,"
                " and the program stashes weights. Use a schedule that flushes, such as 1f1b."
            )
