"""Checkpoints: one file for each stage and replica, and resuming from the last complete set.

In:  a runner between two runs of its program.
Out: `DIR/run-00000012/stage-3-rank-3.pt`, and a runner that goes on from there.

A file is written beside its place and then moved there, so that one that is there is whole; a set is complete
when all its files are there. Resuming needs the same program and seed.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.program import Layout
from pipeline.runtime.errors import RunError

if TYPE_CHECKING:
    from pipeline.runtime.runner import Runner


def save(runner: Runner, directory: Path) -> None:
    """Write this rank's stages; every rank does this after the same run."""
    folder = directory / f"run-{runner.runs:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for s, stage in runner.stages.items():
        optimizer = stage.weights.optimizer
        content = {
            "program": _digest(runner),
            "seed": runner.options.seed,
            "runs": runner.runs,
            "module": stage.weights.module.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
        }
        path = folder / _name(s, runner.rank)
        partial = path.with_suffix(".partial")
        torch.save(content, partial)
        os.replace(partial, path)


def latest(layout: Layout, directory: Path) -> Path | None:
    """The newest complete set of files."""
    wanted = {_name(s, r) for s, stage in enumerate(layout.stages) for r in stage.ranks}
    for folder in sorted(directory.glob("run-*"), reverse=True):
        if wanted <= {path.name for path in folder.iterdir()}:
            return folder
    return None


def resume(runner: Runner, directory: Path) -> bool:
    """Go on from the newest complete set; False when there is none.

    Raises:
        RunError: It belongs to another program or seed.
    """
    folder = latest(runner.layout, directory)
    if folder is None:
        return False
    for s, stage in runner.stages.items():
        path = folder / _name(s, runner.rank)
        content = torch.load(path, weights_only=True)
        for what, here in (("program", _digest(runner)), ("seed", runner.options.seed)):
            if content[what] != here:
                raise RunError(
                    f"{path} was written with another {what}. Resume with the plan and options it was made"
                    " with, or start anew in another directory."
                )
        stage.weights.module.load_state_dict(content["module"])
        if stage.weights.optimizer is not None:
            stage.weights.optimizer.load_state_dict(content["optimizer"])
        runner.runs = content["runs"]
    return True


def _name(stage: int, rank: int) -> str:
    return f"stage-{stage}-rank-{rank}.pt"


def _digest(runner: Runner) -> str:
    return blake2b(str(runner.program).encode(), digest_size=16).hexdigest()
