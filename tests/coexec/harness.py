"""Runs a program eagerly and by co-execution, and compares everything that can be observed.

A program is a function that makes its state and a step function `step(state, k, tape)`, which a user
would have written with the one line that changes, `with tape():`. After each step everything reachable
from the state is compared bit for bit: values, metadata, gradients, which tensors are one object and
which share memory; also what was printed, returned and raised, and the default generator's state.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import coexec
from coexec._native import core
from coexec._private import FRAMES_SAVE_INPUTS

#: In the error of a compiled block whose input is not like the one that it was compiled for.
MADE_FOR_SOMETHING_ELSE = "was made for something else"


#: For tests of what only the native core does.
native = pytest.mark.skipif(core is None, reason="the native core is not built")

#: For tests in which checkpoints are co-executed.
checkpoints = pytest.mark.skipif(
    core is None or not FRAMES_SAVE_INPUTS,
    reason="the native core is not built, or this PyTorch's checkpoints are left to it",
)


class EagerTape(contextlib.nullcontext):
    """What a program enters instead of a `GradientTape` when it runs eagerly."""

    def __enter__(self):
        return self

    def gradient(self, target, sources, output_gradients=None):
        leaves, structure = torch.utils._pytree.tree_flatten(sources)
        grads = torch.autograd.grad(target, leaves, output_gradients, allow_unused=True)
        return torch.utils._pytree.tree_unflatten(list(grads), structure)


def eager_tape(**options):
    return EagerTape()


@dataclass
class Observed:
    """What one step let the outside see."""

    printed: str
    returned: Any
    raised: Any
    state: Any
    random: Any


def run(make, step, steps, tape, every=1):
    """Runs `steps` steps; exceptions that leave a step are observed, and training goes on.

    Everything that can be observed is, after each step or after `every` so many: looking at tensors waits for
    them, so between two looks the program runs as it would alone.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    state = make()
    seen = []
    for k in range(steps):
        printed, returned, raised = io.StringIO(), None, None
        with contextlib.redirect_stdout(printed):
            try:
                returned = step(state, k, tape)
            except BaseException as e:
                raised = (type(e).__name__, str(e))
        walk = (lambda value: None) if (k + 1) % every and k + 1 < steps else _Walk()
        seen.append(
            Observed(
                printed.getvalue(),
                walk(returned),
                raised,
                walk(state),
                torch.get_rng_state().numpy().tobytes(),
            )
        )
        del returned
    return seen


def compare(make, step, steps, *, programs=None, every=1, **options):
    """Compares a program under co-execution with eager, step by step.

    Args:
        make: makes the state.
        step: `step(state, k, tape)`.
        steps: how many.
        programs: how many places (or keys) the program has, to be returned; None for one.
        every: after how many steps everything is looked at.
        options: of `GradientTape`.

    Returns:
        The program's report; a tuple of reports for several.
    """
    coexec.reset()
    eager = run(make, step, steps, eager_tape, every)
    options = {"check": True, **options}
    mine = run(make, step, steps, functools.partial(coexec.GradientTape, **options), every)
    for k, (a, b) in enumerate(zip(eager, mine, strict=True)):
        for what in ("raised", "printed", "returned", "state", "random"):
            x, y = getattr(a, what), getattr(b, what)
            assert x == y, f"step {k}, {what}: {difference(x, y)}\n{coexec.explain()}"
    reports = coexec.explain().programs
    assert_blocks_fit(reports)
    if programs is None:
        assert len(reports) == 1
        return reports[0]
    assert len(reports) == programs
    return reports


def assert_blocks_fit(reports):
    """Asserts that no compiled block was given what it was not made for."""
    found = [c.cause for report in reports for c in report.causes if MADE_FOR_SOMETHING_ELSE in c.cause]
    assert not found, found


def coexecuted(report, at_least=1):
    """Asserts that a program ended in the co-execution phase and spent enough iterations there."""
    assert report.phase == "co-execution", report.summary()
    assert report.steps.get("co-execution", 0) >= at_least, report.summary()
    return True


class Twice(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def linear(**options):
    """A linear layer with SGD and momentum."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})
    return SimpleNamespace(model=model, optimizer=optimizer, log=[])


def train(state, loss):
    """The usual end of a training step."""
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()


def weights(*names, size=3):
    """A state of leaf tensors that require gradients."""
    return lambda: SimpleNamespace(log=[], **{n: torch.randn(size, requires_grad=True) for n in names})


def nothing():
    """A state without anything."""
    return SimpleNamespace(log=[])


def difference(a, b, path="it", same=operator.eq):
    """Where two observations differ first."""
    if type(a) is not type(b):
        return f"{path}: eager {a!r}, co-executed {b!r}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{path} has {list(a)} and {list(b)}"
        pairs = [(k, a[k], b[k]) for k in a]
    elif isinstance(a, tuple):
        if len(a) != len(b):
            return f"{path} has {len(a)} and {len(b)} items: eager {a!r}, co-executed {b!r}"
        pairs = [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return f"{path}: eager {a!r}, co-executed {b!r}"
    for key, x, y in pairs:
        if not same(x, y):
            return difference(x, y, f"{path}.{key}", same)
    return "nothing"


class _Walk:
    """Turns what is reachable into plain values; objects and memory are numbered as they are met."""

    def __init__(self):
        self.objects = {}
        self.memory = {}

    def __call__(self, value):
        if isinstance(value, float):
            return ("float", value.hex())
        if value is None or isinstance(value, (bool, int, complex, str, bytes, torch.dtype, torch.device)):
            return value
        if id(value) in self.objects:
            return ("again", self.objects[id(value)][0])
        number = len(self.objects)
        self.objects[id(value)] = (number, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return ("array", str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, np.generic):
            return ("array", str(value.dtype), (), value.tobytes())
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, tuple(self(v) for v in value))
        if isinstance(value, dict):
            return {k if isinstance(k, (str, int)) else str(self(k)): self(v) for k, v in value.items()}
        if isinstance(value, torch.nn.Module):
            parts = {n: self(p) for n, p in value.named_parameters()}
            parts |= {n: self(b) for n, b in value.named_buffers()}
            return {"training": value.training, **parts}
        if isinstance(value, torch.optim.Optimizer):
            state = tuple((self(k), self(v)) for k, v in value.state.items())
            return {"state": state, "groups": self(value.param_groups)}
        if isinstance(value, torch.Generator):
            return ("generator", value.get_state().numpy().tobytes())
        if isinstance(value, SimpleNamespace):
            return {k: self(v) for k, v in vars(value).items() if not k.startswith("_")}
        return type(value).__name__

    def _tensor(self, tensor):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr() if storage.nbytes() else id(tensor)
        return {
            "class": type(tensor).__name__,
            "bytes": plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
            "dtype": tensor.dtype,
            "shape": tuple(tensor.shape),
            "stride": tensor.stride(),
            "offset": tensor.storage_offset(),
            "lazy": (tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
            "requires_grad": tensor.requires_grad,
            "is_leaf": tensor.is_leaf,
            "history": None if tensor.grad_fn is None else type(tensor.grad_fn).__name__,
            "grad": self(tensor.grad) if tensor.is_leaf else None,
            "memory": self.memory.setdefault(pointer, len(self.memory)),
        }
