"""What a program of the suite is: an ordinary PyTorch training run, one step at a time.

A program doesn't know which mode runs it. Its step is what a user would write, with one line that changes:
`with tape():`, where `tape` makes a `contextlib.nullcontext` for eager or a `coexec.GradientTape`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import nn

TapeFactory = Callable[[], AbstractContextManager[Any]]
Preset = Literal["small", "full", "tiny"]
"""`small` is for a CPU with few cores, `full` for a GPU (and runs on it), `tiny` for tests."""
PRESETS: tuple[Preset, ...] = ("small", "full", "tiny")


def device_of(preset: Preset) -> torch.device:
    """Return where a preset's model and data belong: `full` runs on the GPU if there is one."""
    return torch.device("cuda" if preset == "full" and torch.cuda.is_available() else "cpu")


class Training(Protocol):
    """One training run with its model, data and position; two runs of one seed take the same steps."""

    steps_per_epoch: int
    logged: list[tuple[int, float]]
    """The losses that the program itself read, as (step, loss)."""

    @property
    def model(self) -> nn.Module:
        """What is trained; an `nn.ModuleDict` where it is several models."""

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """What updates the model's parameters."""

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""

    def end_epoch(self) -> None:
        """Do what the program does between epochs, such as stepping a learning-rate schedule."""

    def evaluate(self) -> float:
        """Return the metric that the program names, measured on data it doesn't train on."""


@dataclass(frozen=True, slots=True)
class Program:
    """A member of the suite."""

    name: str
    description: str
    metric: str
    """What `Training.evaluate` returns, with its unit."""
    make: Callable[[int, Preset], Training]
    """Seeds the default random generators and builds a run: `make(seed, preset)`."""
    requires: tuple[str, ...] = ()
    """Packages that the program needs beside those of `bench`."""


def missing_packages(program: Program) -> tuple[str, ...]:
    """Return which packages that a program needs are not installed."""
    return tuple(name for name in program.requires if find_spec(name) is None)
