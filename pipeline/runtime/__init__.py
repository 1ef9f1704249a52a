"""Runs programs on torch.distributed: `Runner` on each rank executes its part.

    entry, stage           what a stage computes
    saved, storages        what it holds; storages that can move to another rank and back
    split                  backward in two parts
    weights, replicas      versions of weights, and gradients of replicas
    averaged               gradients of DistributedDataParallel
    specs                  what ranks agree on before they start
    place, combinations    several processes that act as one rank, and what they can't do
    channels, sends        messages, with a time limit
    values, exchange       activations and gradients between stages
    transfers              what moves to another rank and back
    runner, options        all of it, action by action
    checkpoint             files to go on from
    reference              the same training in one process, to compare with
    job, worker, launch    a whole job on this machine, by torchrun; `torchrun` starts that
    measure, progress      what stages cost, and where ranks are

Start at `runner.Runner`.
"""

from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.options import Options, Outcome
from pipeline.runtime.runner import Runner
from pipeline.runtime.stage import StageModule

__all__ = ["InPlaceError", "Options", "Outcome", "RunError", "Runner", "StageModule"]
