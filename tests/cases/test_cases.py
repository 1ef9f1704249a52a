"""Small programs, each with a trait that breaks tracers and compilers, equal eager bit for bit.

`programs/README.md` states the contract of a case. Every case runs for its number of steps under eager and
under co-execution, waiting at the end of each block or not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coexec

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("[0-9]*.py"))


def load(path):
    name = f"coexec_case_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def plain(value):
    """What can be compared after the run: tensors as dense copies."""
    if isinstance(value, torch.Tensor):
        value = value.detach().as_subclass(torch.Tensor)
        return value.to_dense().clone() if value.is_sparse else value.clone()
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def run(path, tape):
    """Everything observable of a case: losses, exceptions, state, side effects, random streams."""
    case = load(path)
    seed(0)
    model, optimizer, data = case.make()
    state = SimpleNamespace(model=model, opt=optimizer, it=0, log=[])
    if hasattr(case, "setup"):
        case.setup(state)
    seed(123)
    losses = []
    for it, batch in zip(range(getattr(case, "STEPS", 12)), data, strict=False):
        state.it = it
        try:
            with tape() as t:
                loss = case.step(state, batch, t)
        except getattr(case, "EXPECTED", ()) as e:
            loss = f"raised {type(e).__name__}"
        losses.append(plain(loss))
    optimizers = [o for o in (optimizer if isinstance(optimizer, tuple) else (optimizer,)) if o is not None]
    return {
        "losses": losses,
        "parameters and buffers": [[k, plain(v)] for k, v in state.model.state_dict().items()],
        "gradients": [plain(p.grad) for p in state.model.parameters()],
        "optimizer state": [plain(v) for o in optimizers for s in o.state.values() for v in s.values()],
        "side effects": plain(case.extra(state)) if hasattr(case, "extra") else [],
        "random streams": [torch.get_rng_state(), str(random.getstate()), str(np.random.get_state())],
    }


def same(a, b):
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b or (a != a and b != b)


@pytest.mark.filterwarnings("ignore")  # eager's own, which the cases provoke
@pytest.mark.parametrize("synchronous", [True, False], ids=["waiting", "going on"])
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_a_case_equals_eager(path, synchronous):
    expected = run(path, contextlib.nullcontext)
    coexec.reset()
    ours = run(path, lambda: coexec.GradientTape(synchronous=synchronous, check=True))
    coexec.reset()
    assert [part for part in expected if not same(expected[part], ours[part])] == []
