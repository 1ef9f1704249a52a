"""Cases: small training programs, one a file, each with a trait that breaks tracers and compilers.

In:  a file that follows the contract in `tests/cases/programs/README.md`.
Out: what the program let the outside see, eagerly or inside of a tape, and how two of these differ.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.randomness import seed_everything
from bench.state import Difference, compare_named

STEPS = 12
TOLERANCE = (1e-4, 1e-5)
"""Relative and absolute, of cases that don't name their own."""

Tape = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """A program under the contract."""

    name: str
    module: ModuleType

    @property
    def steps(self) -> int:
        """How many steps it is run for."""
        return int(getattr(self.module, "STEPS", STEPS))

    @property
    def tolerance(self) -> tuple[float, float]:
        """Relative and absolute distance that an executor which reassociates sums may have from eager."""
        relative, absolute = getattr(self.module, "TOL", TOLERANCE)
        return relative, absolute


@dataclass(slots=True)
class Observed:
    """What one run of a case let the outside see, as named values, and how long its steps took."""

    values: dict[str, Any] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)
    error: Exception | None = None
    """What left a step although the case doesn't expect it; the run ended there."""


def case_files(folder: Path) -> list[Path]:
    """Return the cases of a folder: Python files whose names begin with a digit."""
    return sorted(folder.glob("[0-9]*.py"))


def load_case(path: Path) -> Case:
    """Import a case.

    Raises:
        ImportError: if the file can't be imported or lacks `make` or `step`.
    """
    name = f"coexec_case_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if missing := [function for function in ("make", "step") if not hasattr(module, function)]:
        raise ImportError(f"{path} is no case: it has no {' and no '.join(missing)}")
    return Case(path.stem, module)


def run_case(
    case: Case,
    tape: Tape = contextlib.nullcontext,
    after_step: Callable[[int], None] | None = None,
    prepare: Callable[[SimpleNamespace], Callable[..., Any]] | None = None,
) -> Observed:
    """Run a case with all random generators seeded, each step inside of `tape()`.

    Args:
        case: the program.
        tape: makes what a step runs in.
        after_step: called with the number of each step behind it; its time is not counted.
        prepare: may change the state before the first step; returns what is called as the step.
    """
    module, seen = case.module, Observed()
    seed_everything(0)
    model, optimizer, data = module.make()
    state = SimpleNamespace(model=model, opt=optimizer, it=0, log=[])
    if hasattr(module, "setup"):
        module.setup(state)
    step = module.step if prepare is None else prepare(state)
    seed_everything(123)
    for it, batch in zip(range(case.steps), data, strict=False):
        state.it = it
        start = time.perf_counter()
        try:
            with tape() as entered:
                loss = step(state, batch, entered)
        except getattr(module, "EXPECTED", ()) as error:
            loss = f"raised {type(error).__name__}"
        except Exception as error:
            seen.error = error
            break
        finally:
            seen.step_ms.append((time.perf_counter() - start) * 1e3)
        seen.values[f"loss {it}"] = _plain(loss)
        if after_step:
            after_step(it)
    seen.values |= _end_state(state, module)
    return seen


def difference(ours: Observed, eager: Observed, tolerance: tuple[float, float] | None) -> Difference:
    """Compare two runs: bit for bit, or within a relative and absolute tolerance."""
    names = dict.fromkeys([*eager.values, *ours.values])
    found = compare_named(names, ours.values, eager.values, lambda a, b: _compare(a, b, tolerance))
    if found.equal and _text(ours.error) != _text(eager.error):
        return Difference(False, found.max_abs, "exception")
    return found


def _end_state(state: SimpleNamespace, module: ModuleType) -> dict[str, Any]:
    """Return everything that is left behind a run; reading it waits for what is still being written."""
    values: dict[str, Any] = {}
    for name, value in state.model.state_dict().items():
        values[f"state {name}"] = _plain(value)
    for name, parameter in state.model.named_parameters():
        values[f"gradient {name}"] = _plain(parameter.grad)
    optimizers = state.opt if isinstance(state.opt, tuple) else (state.opt,)
    for number, optimizer in enumerate(optimizers):
        if optimizer is not None:
            # By number: a parameter's name may have changed since the optimizer was made.
            for index, slots in optimizer.state_dict()["state"].items():
                values[f"optimizer {number} {index}"] = _plain(slots)
    if hasattr(module, "extra"):
        values["side effects"] = _plain(module.extra(state))
    values["random numbers of torch"] = torch.get_rng_state()
    values["random numbers of Python"] = str(random.getstate())
    values["random numbers of NumPy"] = str(np.random.get_state())
    return values


def _plain(value: Any) -> Any:
    """Return what can be compared after the run: tensors as dense copies."""
    if isinstance(value, torch.Tensor):
        value = value.detach().as_subclass(torch.Tensor)
        return value.to_dense().clone() if value.layout is not torch.strided else value.clone()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return [[str(key), _plain(item)] for key, item in value.items()]
    return value


def _compare(ours: Any, eager: Any, tolerance: tuple[float, float] | None) -> tuple[float, bool]:
    """Return the largest distance of two values, and whether they agree."""
    if isinstance(eager, list):
        if not isinstance(ours, list) or len(ours) != len(eager):
            return math.inf, False
        compared = [_compare(a, b, tolerance) for a, b in zip(ours, eager, strict=True)]
        return max((d for d, _ in compared), default=0.0), all(agrees for _, agrees in compared)
    if isinstance(eager, torch.Tensor):
        return (
            _compare_tensors(ours, eager, tolerance) if isinstance(ours, torch.Tensor) else (math.inf, False)
        )
    if type(ours) is not type(eager):
        return math.inf, False
    if isinstance(eager, float):
        return _compare_tensors(
            torch.tensor(ours, dtype=torch.float64), torch.tensor(eager, dtype=torch.float64), tolerance
        )
    agrees = bool(ours == eager)
    return 0.0 if agrees else math.inf, agrees


def _compare_tensors(
    ours: torch.Tensor, eager: torch.Tensor, tolerance: tuple[float, float] | None
) -> tuple[float, bool]:
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        return math.inf, False
    ours, eager = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (ours, eager))
    if ours.numel() == 0 or torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours, eager))):
        return 0.0, True
    distance = (
        (ours.to(torch.complex128) - eager.to(torch.complex128)).abs().nan_to_num(math.inf).max().item()
    )
    if tolerance is None or not (eager.is_floating_point() or eager.is_complex()):
        return distance, False
    relative, absolute = tolerance
    return distance, torch.allclose(ours, eager, relative, absolute, equal_nan=True)


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
