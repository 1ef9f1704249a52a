"""A compiled block is given what it was compiled for, on every path, and looks at that itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import coexec
from coexec import program_state
from coexec._native import core
from coexec.executors import blocks
from coexec.programs import all_states
from coexec.tracegraph.graph import varying_captures
from tests.coexec.harness import (
    MADE_FOR_SOMETHING_ELSE,
    assert_blocks_fit,
    coexecuted,
    compare,
    linear,
    train,
)
from tests.coexec.uncompiled import use_graphs

pytestmark = pytest.mark.skipif(core is None, reason="compiled blocks need the native module")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    use_graphs(monkeypatch.setattr)


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def apart(request, monkeypatch):
    """Whether backward passes are in pieces from the first trace on."""
    monkeypatch.setattr(program_state, "ALWAYS_IN_PIECES", request.param)


def compiled(report):
    """Asserts that a program ended on the graphs of its blocks."""
    return coexecuted(report) and {b.executor for b in report.blocks} == {"inductor"}


def stages():
    state = linear()
    state.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    state.optimizer = torch.optim.SGD(state.stages.parameters(), lr=0.1)
    return state


@pytest.mark.parametrize("together", [torch.stack, torch.cat])
def test_an_argument_that_has_another_size_on_each_path(apart, together):
    def step(state, k, tape):
        x = torch.randn(3, 4)
        with tape():
            losses = []
            for layer in state.stages[: 1 + k % 4]:
                x = layer(x).tanh()
                losses.append(x.square().mean()[None] if together is torch.cat else x.square().mean())
            loss = together(losses).mean()
            train(state, loss)
        return loss

    assert compiled(compare(stages, step, 16, executor="inductor"))


def swapped(tensor, value):
    tensor.data = value


def resized(tensor, value):
    with torch.no_grad():
        tensor.resize_(value.shape).copy_(value)


@pytest.mark.parametrize("change", [swapped, resized, torch.Tensor.set_])
@pytest.mark.parametrize("sizes", [(1, 2), (3, 5), (2, 4, 3, 5, 6)])
def test_a_tensor_that_stays_and_changes_its_size(apart, change, sizes):
    def make():
        state = linear()
        state.buffer = torch.ones(sizes[0], 4)
        return state

    def step(state, k, tape):
        change(state.buffer, torch.full((sizes[k % len(sizes)], 4), float(k)))
        with tape():
            loss = state.model(state.buffer).square().mean() + (state.buffer * 2).sum()
            train(state, loss)
        return loss

    assert compiled(compare(make, step, 14, executor="inductor"))
    [state] = all_states()
    assert not varying_captures(state.graph)


WRONG = [
    lambda given: replace(given, shape=(*given.shape[:-1], given.shape[-1] + 1)),
    lambda given: replace(given, stride=(*given.stride[:-1], given.stride[-1] + 1)),
    lambda given: replace(given, dtype=torch.float64),
]


@pytest.mark.parametrize("wrong", WRONG, ids=["shape", "strides", "dtype"])
def test_a_block_that_was_made_for_something_else_does_not_run(monkeypatch, wrong):
    right = blocks._given

    def given(register, registers):
        known = right(register, registers)
        return wrong(known) if len(known.shape) == 2 else known

    def step(state, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = state.model(x).square().mean()
            train(state, loss)
        return loss

    monkeypatch.setattr(blocks, "_given", given)
    monkeypatch.setattr("tests.coexec.harness.assert_blocks_fit", lambda reports: None)
    report = compare(linear, step, 6, executor="inductor")
    assert report.steps.get("co-execution", 0) == 0
    assert any(c.id == "CX0005" and MADE_FOR_SOMETHING_ELSE in c.cause for c in report.causes)
    with pytest.raises(AssertionError, match=MADE_FOR_SOMETHING_ELSE):
        assert_blocks_fit([report])


@pytest.mark.slow
def test_a_library_sees_the_size_of_this_path(monkeypatch):
    monkeypatch.undo()  # with the compiler
    tape = partial(coexec.GradientTape, executor="inductor")
    monkeypatch.setattr(coexec.options, "background", False)
    found, expected = [], []
    for k in range(12):
        x = torch.randn(3, 4)
        with tape():
            values = [x.square().mean() * (i + 1) for i in range(1 + k % 4)]
            total = torch.stack(values).sum()
        found.append(total.item())
        expected.append(sum((x.square().mean() * (i + 1)).item() for i in range(1 + k % 4)))
    assert found == pytest.approx(expected, rel=1e-5)
    [report] = coexec.explain().programs
    assert compiled(report)
