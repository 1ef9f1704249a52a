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


NUDGED_DISTANCES = 4
"""How much farther from eager than nudged eager runs a run may be: it rounds in each step, these once."""
NUDGES = 4
"""How many nudged runs there are: one may by chance end close to eager in what has a few numbers only."""


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


def nudge(run: Run, number: int) -> None:
    """Change every parameter by one unit in the last place, as an error of rounding may.

    Args:
        run: a run that has not begun.
        number: of the nudge: each changes other parameters upwards, number 0 all of them.
    """
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in run.training.model.parameters():
            up = (torch.rand(parameter.shape, generator=generator) < 0.5).to(parameter.device) | (number == 0)
            towards = torch.where(up, math.inf, -math.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, towards))


def compare_runs(
    run: Run,
    losses: Sequence[float],
    eager: Run,
    eager_losses: Sequence[float],
    nudged: Sequence[State] = (),
) -> Difference:
    """Compare a run with eager: losses, state and, where nothing may differ, the random numbers to come.

    Args:
        run: a run that has taken some steps.
        losses: of these.
        eager: what it is compared with.
        eager_losses: likewise.
        nudged: the states of eager runs that were nudged before their first steps. Training can make anything
            of a rounding error; what comes of these is allowed where a run is not held to every bit.
    """
    tolerance = tolerance_of(run)
    difference = compare_states(snapshot(run, losses), snapshot(eager, eager_losses), tolerance, nudged)
    if difference.equal and tolerance is None and not run.random.matches(eager.random):
        return Difference(False, difference.max_abs, "state of the random generators")
    return difference


def compare_states(
    state: State, eager: State, tolerance: float | None, nudged: Sequence[State] = ()
) -> Difference:
    """Compare two snapshots; see `compare_runs`."""
    names = sorted(state.keys() | eager.keys())
    difference = compare_named(
        names, state, eager, lambda value, expected: _compare_tensors(value, expected, tolerance)
    )
    if difference.equal or tolerance is None or not nudged:
        return difference
    apart = (name for name in names if not _is_near(name, state, eager, tolerance, nudged))
    first = next(apart, None)
    return Difference(first is None, difference.max_abs, first)


def _is_near(name: str, state: State, eager: State, tolerance: float, nudged: Sequence[State]) -> bool:
    """Whether a value is within the tolerance, or about as far from eager's as a nudged one."""
    if not all(name in states for states in (state, eager, *nudged)):
        return False
    value, expected, *others = (states[name].double() for states in (state, eager, *nudged))
    if any(v.shape != expected.shape for v in (value, *others)):
        return False
    if name == "losses":  # each of them, so that the first steps have to agree
        farthest = torch.stack([(other - expected).abs() for other in others]).amax(0).cummax(0).values
        allowed = (NUDGED_DISTANCES * farthest).maximum(tolerance * expected.abs())
        return bool(((value - expected).abs() <= allowed).all())
    farthest = torch.stack([(other - expected).norm() for other in others]).max()
    return bool((value - expected).norm() <= max(tolerance * expected.norm(), NUDGED_DISTANCES * farthest))


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
