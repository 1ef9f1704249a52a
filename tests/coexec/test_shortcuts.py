"""Torch calls on a short way to the skeleton: the same calls, with PyTorch's errors, modes and functions."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import coexec
from coexec._native import core
from coexec._native.entry import EnteredNatively
from tests.coexec.harness import coexecuted, compare, native

pytestmark = native

X = torch.randn(3, 4)
W = torch.nn.Parameter(torch.ones(3))


class Noting(TorchFunctionMode):
    """A mode of the user that notes what it is called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs))
        return function(*args, **(kwargs or {}))


def used():
    """Co-executes a program that has the calls of this file, so that they are short from then on."""

    def step(s, k, tape):
        x = torch.ones(3, 4)
        with tape():
            s.total = (torch.relu(x) + x.t().mT * 2 - x.add(x, alpha=3))[:2].view(-1).sum()
            s.shape = x.shape, x.size(), x.dim(), x.requires_grad, x.T.shape
        return s.total

    coexecuted(compare(SimpleNamespace, step, 8), 4)


CALLS = {
    "method": lambda x: x.add(x, alpha=2),
    "method without arguments": lambda x: x.t(),
    "operator": lambda x: x + 1,
    "reflected": lambda x: 1 + x,
    "in place": lambda x: x.clone().__iadd__(x),
    "function": lambda x: torch.relu(x),
    "keyword": lambda x: torch.add(input=x, other=x),
    "of nn": lambda x: F.linear(x, x),
    "unpacked": lambda x: torch.mul(*[x, x]),
    "by map": lambda x: next(map(torch.relu, [x])),
    "bound": lambda x: (lambda f: f(-1))(x.view),
    "unbound": lambda x: torch.Tensor.sum(x),
    "property": lambda x: x.T,
    "property by hand": lambda x: torch.Tensor.mT.__get__(x),
    "index": lambda x: x[1:, 2],
    "index of tensors": lambda x: x[torch.tensor([0, 2])],
    "index by hand": lambda x: torch.Tensor.__getitem__(x, 0),
    "index of a parameter": lambda x: W[:2].detach() + x[0, 0],
    "shape": lambda x: list(x.shape),
    "dim": lambda x: x.dim(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_call_is_the_graphs_however_it_is_made(call):
    def step(s, k, tape):
        x = torch.randn(3, 4)
        with tape():
            s.result = call(x * 1)

    coexecuted(compare(SimpleNamespace, step, 12), 8)


ERRORS = {
    "no such overload": lambda x: torch.add(x, "1"),
    "too few": lambda x: torch.mul(x),
    "too many": lambda x: x.dim(1),
    "an unknown keyword": lambda x: torch.relu(x, no=1),
    "an operator": lambda x: x + "1",
    "no tensor": lambda x: torch.Tensor.add("1", x),
    "no argument": lambda x: torch.Tensor.add(),
    "sizes": lambda x: x.view(5),
    "index": lambda x: x[:, 9],
    "no index": lambda x: x["1"],
    "shapes": lambda x: torch.add(x, torch.ones(7, 7)),
}


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_pytorchs(call):
    used()

    def step(s, k, tape):
        with tape():
            s.total = (X * 2).sum()
            if k % 4 == 3:
                call(X)

    compare(SimpleNamespace, step, 12)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_mode_of_the_user_gets_what_pytorch_hands_over(call):
    def calls():
        with Noting() as mode:
            call(X)
        return [(f, [type(a) for a in args], kwargs) for f, args, kwargs in mode.calls]

    with Noting() as before:
        X.sin()
    expected = calls()
    used()

    assert before.calls[0][0] is torch.Tensor.sin
    assert calls() == expected


@pytest.mark.parametrize("outside", [True, False])
def test_a_mode_of_the_user_around_or_in_the_block_sees_its_calls(outside):
    def step(s, k, tape):
        x = torch.randn(3, 4)
        mode = Noting()
        if outside:
            with mode, tape():
                s.result = torch.relu(x.add(1)), x.dim()
        else:
            with tape(), mode:
                s.result = torch.relu(x.add(1)), x.dim()
        seen = [f.__name__ for f, _, _ in mode.calls]
        s.seen = None if outside else seen

    compare(SimpleNamespace, step, 10)


class Tagged(torch.Tensor):
    """A subclass with its own answers."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        if isinstance(result, Tagged):
            result.note = function.__name__
        return result


def test_a_subclass_answers_for_itself():
    used()

    def step(s, k, tape):
        x = torch.ones(3, 4)
        with tape():
            s.total = (x * 2).sum()
            s.note = torch.relu(x.as_subclass(Tagged)).add(1).note
            s.shape = x.as_subclass(Tagged).shape

    compare(SimpleNamespace, step, 8)


def test_disabled_torch_functions_stay_disabled():
    used()

    def step(s, k, tape):
        x = torch.ones(3, 4)
        with tape():
            y = x * 2
            with torch._C.DisableTorchFunctionSubclass():
                s.result = y.add(1).sum()

    compare(SimpleNamespace, step, 8)


def test_functions_are_found_where_they_were_put():
    functions = [torch.relu, torch.add, torch.Tensor.add, torch.Tensor.t, torch.Tensor.__add__, F.linear]
    functions += [
        torch.Tensor.__getitem__,
        torch.Tensor.shape,
        torch.Tensor.shape.__get__,
        torch._C._set_grad_enabled,
        torch.Tensor.T,
    ]
    found = {f: i for i, f in enumerate(functions)}
    core.shorten(functions)
    used()

    assert [found[f] for f in functions] == list(range(len(functions)))
    assert torch.relu == torch._C._VariableFunctions.relu
    assert torch.Tensor.__add__ is torch._C.TensorBase.__add__
    assert torch.relu.__name__ == "relu"
    assert torch.add.__doc__


def test_what_is_shortened_can_be_shortened_again():
    used()
    core.shorten([torch.relu, torch.Tensor.add, torch.Tensor.T, torch.Tensor.backward, 3, None])

    assert torch.equal(torch.relu(X), X.clamp(min=0))
    assert torch.equal(X.add(1), X + 1)
    assert torch.equal(X.T, X.t())


def test_functions_are_copied_and_pickled_as_before():
    used()

    assert copy.deepcopy(torch.relu) is torch.relu
    assert pickle.loads(pickle.dumps(torch.relu)) is torch.relu


def test_other_threads_call_pytorch():
    used()
    results = []

    def work():
        with torch.no_grad():
            results.append((torch.relu(X).add(1), X.shape))

    with coexec.GradientTape():
        total = (X * 2).sum()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        total.detach()

    assert torch.equal(results[0][0], torch.relu(X) + 1)
    assert results[0][1] == (3, 4)


def test_torch_compile_takes_the_functions():
    used()

    @torch.compile(backend="eager", fullgraph=True)
    def f(x):
        return torch.relu(x).add(1).t() + x.T * x.dim()

    assert torch.equal(f(X), torch.relu(X).add(1).t() + X.T * 2)


def test_what_python_answers_it_is_asked_once(monkeypatch):
    asked = []
    used()

    class Mode(EnteredNatively):
        outermost = None

        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return 7

    with Mode():
        assert X.add(1) == 7
        assert torch.relu(X) == 7
        assert X.T == 7

    assert asked[:2] == [torch.Tensor.add, torch.relu]
    assert len(asked) == 3
