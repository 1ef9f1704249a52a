"""Runs programs on torch.distributed: `Runner` on each rank executes its part.

    saved, entry, stage    what a stage computes and holds; storages that can move to another rank and back
    weights, replicas      versions of weights, and gradients of replicas
    specs                  what ranks agree on before they start
    channels, sends        messages, with a time limit
    runner                 all of it, action by action

Start at `runner.Runner`.
"""

from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.runner import Options, Outcome, Runner
from pipeline.runtime.stage import StageModule

__all__ = ["InPlaceError", "Options", "Outcome", "RunError", "Runner", "StageModule"]
