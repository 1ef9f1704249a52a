"""What takes part: a program in a mode, set up as somebody would who knows the mode well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_map

from bench.modes import EXECUTORS, Executor, Mode, Run, called_models, compile_training, start_run
from bench.program import Preset, Training, device_of
from bench.programs import PROGRAMS

SpeedMode = Literal[
    "eager", "coexec", "coexec:asynchronous", "lazy", "compile:default", "compile:max-autotune"
]
# What compiles longest comes last: when time is short, it is what has none.
SPEED_MODES: tuple[SpeedMode, ...] = get_args(SpeedMode)
_WITH_GRAPH = ("coexec", "coexec:asynchronous", "lazy")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contenders have in common."""

    preset: Preset
    seed: int
    threads: int
    amp: bool = False
    """Whether the models' forward passes run in bfloat16 where autocast does so."""
    channels_last: bool = False


@dataclass(frozen=True, slots=True)
class Contender:
    """One program in one mode."""

    program: str
    mode: SpeedMode
    executor: Executor | None
    """What runs the graph; None in modes without one."""

    @property
    def title(self) -> str:
        """The mode's name in tables."""
        return f"{self.mode} ({self.executor})" if self.executor else self.mode


def contenders(program: str, modes: Sequence[SpeedMode], executors: Sequence[Executor]) -> list[Contender]:
    """Return who takes part for one program: each mode that has a graph with each executor."""
    with_graph = [
        Contender(program, mode, executor)
        for executor in EXECUTORS
        if executor in executors
        for mode in SPEED_MODES
        if mode in modes and mode in _WITH_GRAPH
    ]
    others = [Contender(program, m, None) for m in SPEED_MODES if m in modes and m not in _WITH_GRAPH]
    return [*others[:1], *with_graph, *others[1:]]


def start(contender: Contender, setup: Setup) -> Run:
    """Build the run, and let what its mode needs be compiled when it is first called."""
    mode: Mode = "eager"
    if contender.mode in _WITH_GRAPH:
        mode = "lazy" if contender.mode == "lazy" else "coexec"
    run = start_run(
        PROGRAMS[contender.program],
        mode,
        executor=contender.executor or "aten",
        seed=setup.seed,
        preset=setup.preset,
        synchronous=contender.mode != "coexec:asynchronous",
        eager_if_faster=True,
    )
    if setup.channels_last:
        run.training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if setup.amp:
        _autocast(run.training)
    if contender.mode.startswith("compile:"):
        compile_training(run.training, compile_options(contender.mode, device_of(setup.preset)))
    return run


def compile_options(mode: SpeedMode, device: torch.device) -> dict[str, Any]:
    """Return the arguments of torch.compile.

    On a CPU the random numbers are eager's, so that all modes see the same batches; that costs nothing there.
    """
    from torch._inductor import list_mode_options

    name = mode.removeprefix("compile:")
    options: dict[str, Any] = {} if name == "default" else list_mode_options(name)
    if device.type == "cpu":
        options = options | {"fallback_random": True}
    return {"options": options} if options else {}


def _autocast(training: Training) -> None:
    """Run the models' forward passes under autocast; what they return is float32, for the losses."""
    for model in called_models(training.model):
        model.forward = _in_bfloat16(model)


def _in_bfloat16(model: nn.Module) -> Any:
    forward = model.forward
    device = next(model.parameters()).device.type

    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            returned = forward(*args, **kwargs)
        return tree_map(_float32, returned)

    return autocast_forward


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value
