"""The modes that a program is run in, and a run of one of them.

Every run has its own copy of the model, built from the same seed, and its own stream of random numbers, so
that runs that are interleaved in one process each see what they would have seen alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from bench.program import Preset, Program, TapeFactory, Training
from bench.randomness import RandomState

Mode = Literal["eager", "compile", "coexec", "lazy"]
Executor = Literal["aten", "inductor"]
MODES: tuple[Mode, ...] = ("eager", "compile", "coexec", "lazy")
EXECUTORS: tuple[Executor, ...] = ("aten", "inductor")

_numbers = itertools.count(1)


@dataclass(slots=True)
class Run:
    """One training run in one mode."""

    program: Program
    mode: Mode
    executor: Executor | None
    """What runs the blocks of the symbolic graph; None in modes that have none."""
    key: str
    """Names the run to coexec, which tells the uses of one source line apart by it."""
    training: Training
    tape: TapeFactory
    random: RandomState
    steps: int = 0
    metrics: list[tuple[int, float]] = field(default_factory=list)
    """What the program's `evaluate` returned, as (step, value)."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give this run its own stream of random numbers, and the process the one it had."""
        outer = RandomState.capture()
        self.random.restore()
        try:
            yield
        finally:
            self.random = RandomState.capture()
            outer.restore()

    def wait(self) -> None:
        """Wait until everything that the last step writes is written: using a parameter does."""
        for parameter in self.training.model.parameters():
            parameter.detach().sum().item()

    def finish_epoch_if_due(self) -> None:
        """Do what the program does between epochs, when the last step was an epoch's last."""
        if self.steps % self.training.steps_per_epoch == 0:
            self.training.end_epoch()
            self.metrics.append((self.steps, self.training.evaluate()))


def start_run(
    program: Program,
    mode: Mode,
    *,
    executor: Executor = "aten",
    seed: int = 0,
    preset: Preset = "small",
    synchronous: bool | None = None,
    eager_if_faster: bool = False,
) -> Run:
    """Build a run that has not taken a step yet.

    Args:
        program: What is trained.
        mode: How it is run.
        executor: What runs the blocks of the graph in the modes `coexec` and `lazy`.
        seed: Seeds the model, the data's order and everything random in a step.
        preset: The program's size.
        synchronous: Whether leaving the tape waits for the GraphRunner. None leaves it to coexec.
        eager_if_faster: Whether coexec may run steps eagerly.
    """
    outer = RandomState.capture()
    try:
        training = program.make(seed, preset)
        random = RandomState.capture()
    finally:
        outer.restore()
    key = f"{program.name}/{mode}/{next(_numbers)}"
    tape: TapeFactory = contextlib.nullcontext
    if mode in ("coexec", "lazy"):
        import coexec

        coexec.options.background = False  # what is measured is what was asked for
        coexec.options.eager_if_faster = eager_if_faster
        tape = functools.partial(
            coexec.GradientTape, key=key, executor=executor, mode=mode, synchronous=synchronous
        )
    elif mode == "compile":
        _compile(training)
    used = executor if mode in ("coexec", "lazy") else None
    return Run(program, mode, used, key, training, tape, random)


def called_models(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules that a program calls: the model, or the parts of one that only holds models."""
    return tuple(model.children()) if isinstance(model, nn.ModuleDict) else (model,)


def _compile(training: Training) -> None:
    """Apply torch.compile in its default mode."""
    # Eager's random numbers, without which there is nothing to compare; not slower on a CPU.
    compile_training(training, {"options": {"fallback_random": True}})


def compile_training(training: Training, options: dict[str, Any]) -> None:
    """Apply torch.compile, with these arguments, to the models and to the optimizers' steps.

    Only the models can be demanded to be one graph: an optimizer's step enters a profiler's context.
    """
    for model in called_models(training.model):
        model.compile(**options)
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            # A number would be compiled in: each new learning rate would be a recompilation.
            group["lr"] = torch.tensor(group["lr"])
        step = torch.compile(optimizer.step, **options | {"fullgraph": False})
        optimizer.step = step  # type: ignore[method-assign, assignment]
