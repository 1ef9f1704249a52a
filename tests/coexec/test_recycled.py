"""Placeholders that later iterations use again: no iteration sees what another one did with them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import coexec
from tests.coexec.harness import coexecuted, compare, native

pytestmark = native


def model():
    layer = torch.nn.Linear(4, 4)
    return SimpleNamespace(layer=layer, optimizer=torch.optim.SGD(layer.parameters(), lr=0.1))


def train(s, tape, touch=lambda hidden: None):
    x = torch.randn(3, 4)

    def forward():  # nobody refers to what it makes when the block is left
        hidden = F.relu(s.layer(x))
        return touch(hidden), hidden.square().sum()

    with tape():
        found, loss = forward()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return found, loss


def test_what_nobody_refers_to_is_used_again():
    s = model()
    places = []
    for _ in range(8):
        train(s, coexec.GradientTape, lambda hidden: places.append((id(hidden), type(hidden))))
    gc.collect()

    assert coexec.explain().programs[-1].phase == "co-execution"
    assert len(set(places[-3:])) == 1, places


# Each gives what Python can see of a placeholder before it does something with it.


def attribute(hidden):
    seen = getattr(hidden, "note", None)
    hidden.note = "mine"
    return seen


def dictionary(hidden):
    seen = dict(hidden.__dict__)
    hidden.__dict__["note"] = 1
    return seen


def history(hidden):
    seen = hidden.requires_grad, hidden.is_leaf, hidden._version, hidden.retains_grad
    hidden.retain_grad()
    return seen


def hook(hidden):
    seen = bool(hidden._backward_hooks)
    hidden.register_hook(lambda grad: grad * 2)
    return seen


def detached(hidden):
    other = hidden.detach()
    seen = other.requires_grad, other.grad is None, getattr(other, "note", None)
    other.requires_grad_()
    other.note = 1
    return seen


def in_place(hidden):
    other = hidden * 2
    seen = other._version
    other.add_(1).mul_(3)
    return seen, other.sum().detach()


def given_data(hidden):
    other = hidden.detach() * 2
    seen = tuple(other.shape)
    other.data = torch.ones(2, 2)
    return seen, tuple(other.shape)


def other_class(hidden):
    other = hidden.detach() * 2
    seen = type(other).__name__
    other.__class__ = torch.nn.Parameter
    return seen


def weakly(hidden):
    return weakref.ref(hidden)


TOUCHES = (attribute, dictionary, history, hook, detached, in_place, given_data, other_class)


@pytest.mark.parametrize("options", [{}, {"synchronous": False}, {"mode": "lazy"}], ids=["", "ahead", "lazy"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_an_iteration_does_not_see_what_an_earlier_one_did(touch, options):
    def step(s, k, tape):
        return train(s, tape, touch if k % 3 != 1 else lambda hidden: None)

    compare(model, step, 16, programs=None, **options)


def test_a_weak_reference_ends_with_the_block():
    s = model()
    for k in range(8):
        found, _ = train(s, coexec.GradientTape, weakly)

        assert found() is None, f"step {k}"


@pytest.mark.parametrize("synchronous", [True, False])
def test_what_the_program_keeps_is_not_used_again(synchronous):
    def step(s, k, tape):
        s.kept = [*getattr(s, "kept", []), train(s, tape, lambda hidden: hidden.detach() * 2)]

    assert coexecuted(compare(model, step, 10, synchronous=synchronous), 5)


@pytest.mark.parametrize("synchronous", [True, False])
def test_an_input_is_not_kept_alive_for_the_next_iteration(synchronous):
    s = model()
    inputs = []
    for _ in range(8):
        x = torch.randn(3, 4)
        inputs.append(weakref.ref(x))
        with torch.no_grad(), coexec.GradientTape(synchronous=synchronous):
            total = (s.layer(x) * 2 + x).sum()
        float(total)
        del x

    assert [r() for r in inputs] == [None] * 8


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_placeholder_has_the_sizes_of_its_iteration(dimension):
    def step(s, k, tape):
        shape = [3, 4]
        shape[dimension] += k * k % 5
        x = torch.randn(shape)

        def forward():
            y = x.t() * 2
            seen = [(t.shape, t.stride()) for t in (y, y + 1, y[1:], y.flatten())]
            return seen, y[1:].sum()

        with tape():
            returned = forward()
        return returned

    assert coexecuted(compare(SimpleNamespace, step, 24), 12)


def test_an_iteration_that_leaves_the_graph_is_repeated_with_its_own_tensors():
    def step(s, k, tape):
        x = torch.randn(3, 4)
        with tape():
            y = s.layer(x) + x
            y = y * y
            if k % 7 == 6:
                y = y - x.sum() * k
                s.shown = repr(y)  # a call that no graph has
            y.sum().backward()

    report = compare(model, step, 24)

    assert report.steps["co-execution"] >= 5, report.summary()
    assert report.steps["fallback"] >= 2, report.summary()


@pytest.mark.parametrize("synchronous", [True, False])
def test_no_more_placeholders_are_kept_than_two_iterations_have(synchronous):
    s = model()

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    def steps(count):
        for _ in range(count):
            _, loss = train(s, lambda: coexec.GradientTape(synchronous=synchronous))
        float(loss.detach())

    steps(20)
    before = tensors()
    steps(40)

    assert tensors() < before + 20  # each step makes some


def test_an_exception_in_a_block_leaves_nothing_for_the_next_one():
    def step(s, k, tape):
        with contextlib.suppress(KeyError), tape():
            s.seen = attribute(s.layer(torch.ones(1, 4)))
            if k % 3 == 2:
                raise KeyError(k)
            s.sum = s.layer(torch.ones(1, 4)).sum().detach()

    compare(model, step, 12)
