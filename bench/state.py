"""What a training run has come to, as tensors, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.modes import Run

State = dict[str, torch.Tensor]

RELATIVE_TOLERANCE = 1e-3
"""Inductor reassociates sums, so its results differ from eager's in the last bits,
and training carries these on.

A tensor agrees when its distance from eager's is at most this share of eager's norm. After 200 steps of the
suite's programs torch.compile is 1e-5 to 3e-5 away.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """How a run compares with eager."""

    equal: bool
    """Bit for bit, random generators included, or within the tolerance where there is one."""
    max_abs: float
    """The largest distance of two numbers; infinite when one isn't a number or a tensor is missing."""
    first: str | None
    """The name of the first value that differs by more than is allowed."""


def tolerance_of(run: Run) -> float | None:
    """Return the relative tolerance that a run is held to; None means bit for bit."""
    return RELATIVE_TOLERANCE if run.mode == "compile" or run.executor == "inductor" else None


def snapshot(run: Run, losses: Sequence[float]) -> State:
    """Copy losses, parameters, buffers, gradients, optimizer state and learning rates."""
    model = run.training.model
    state: State = {"losses": torch.tensor(losses, dtype=torch.float64)}
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        state[f"parameter {name}"] = parameter
        if parameter.grad is not None:
            state[f"gradient {name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = buffer
    groups = []
    for optimizer in run.training.optimizers:
        groups += optimizer.param_groups
        for owner, values in optimizer.state.items():
            for key, value in values.items():
                if value is not None:  # SGD's momentum before its first step
                    state[f"optimizer {names[owner]}.{key}"] = torch.as_tensor(value)
    for index, group in enumerate(groups):
        state[f"learning rate {index}"] = torch.as_tensor(group["lr"], dtype=torch.float64)
    return {name: value.detach().clone() for name, value in state.items()}


def compare_runs(run: Run, losses: Sequence[float], eager: Run, eager_losses: Sequence[float]) -> Difference:
    """Compare a run with eager: losses, state and, where nothing may differ, the random numbers to come."""
    tolerance = tolerance_of(run)
    difference = compare_states(snapshot(run, losses), snapshot(eager, eager_losses), tolerance)
    if difference.equal and tolerance is None and not run.random.matches(eager.random):
        return Difference(False, difference.max_abs, "state of the random generators")
    return difference


def compare_states(state: State, eager: State, tolerance: float | None) -> Difference:
    """Compare two snapshots."""
    names = sorted(state.keys() | eager.keys())
    return compare_named(
        names, state, eager, lambda value, expected: _compare_tensors(value, expected, tolerance)
    )


def compare_named(
    names: Iterable[str],
    ours: Mapping[str, Any],
    eager: Mapping[str, Any],
    compare: Callable[[Any, Any], tuple[float, bool]],
) -> Difference:
    """Compare named values; one that only one side has differs.

    Args:
        names: in the order in which the first difference is looked for.
        ours: one side.
        eager: the other.
        compare: the distance of two values, and whether they agree.
    """
    max_abs, first = 0.0, None
    for name in names:
        both = name in ours and name in eager
        distance, agrees = compare(ours[name], eager[name]) if both else (math.inf, False)
        max_abs = max(max_abs, distance)
        if not agrees and first is None:
            first = name
    return Difference(first is None, max_abs, first)


def _compare_tensors(value: torch.Tensor, eager: torch.Tensor, tolerance: float | None) -> tuple[float, bool]:
    if value.shape != eager.shape:
        return math.inf, False
    if value.dtype == eager.dtype and torch.equal(_bytes(value), _bytes(eager)):
        return 0.0, True
    distances = value.double() - eager.double()
    max_abs = distances.abs().max().item()
    if math.isnan(max_abs):
        return math.inf, False
    if tolerance is None:
        return max_abs, False
    return max_abs, distances.norm().item() <= tolerance * eager.double().norm().item()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
