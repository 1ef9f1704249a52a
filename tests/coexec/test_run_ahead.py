"""The next iteration begins while the one before is unfinished."""

from __future__ import annotations

import contextlib
import functools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import coexec
from coexec._native import core
from coexec.executors import inductor
from coexec.runners.python_runner import PythonRunner
from tests.coexec.harness import Twice, coexecuted, compare, eager_tape, linear, native, run, train
from tests.coexec.uncompiled import function_of, use_graphs

SLOW = torch.randn(900, 900) / 900


def slowly(x):
    """The value of `x`, when the graph has computed for longer than Python walks through a block."""
    y = SLOW
    for _ in range(3):
        y = y @ SLOW
    return x + 0 * y[0, 0]


@pytest.fixture
def ahead(monkeypatch):
    """For each co-executed iteration, whether it began before the one before was finished."""
    began = []
    original = PythonRunner.__init__

    def make(self, *args, **kwargs):
        original(self, *args, **kwargs)
        began.append(kwargs["before"] is not None)

    monkeypatch.setattr(PythonRunner, "__init__", make)
    return began


compare_ahead = functools.partial(compare, synchronous=False, every=4)


def network(optimizer=torch.optim.SGD, **options):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return SimpleNamespace(
            model=model, optimizer=optimizer(model.parameters(), lr=0.05, **options), log=[]
        )

    return make


@native
@pytest.mark.parametrize("zeroed", ["first", "last", "before the block", "to zeros"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_equals_eager(ahead, optimizer, zeroed):
    def step(s, k, tape):
        x, y = torch.randn(5, 4), torch.randint(2, (5,))
        if zeroed == "before the block":
            s.optimizer.zero_grad()
        with tape():
            if zeroed in ("first", "to zeros"):
                s.optimizer.zero_grad(set_to_none=zeroed == "first")
            loss = slowly(F.cross_entropy(s.model(x), y))
            loss.backward()
            s.optimizer.step()
            if zeroed == "last":
                s.optimizer.zero_grad()
        return torch.rand(2)

    report = compare_ahead(network(optimizer), step, 16)

    assert coexecuted(report, 8)
    assert zeroed == "before the block" or sum(ahead) >= 6


@native
def test_gradients_are_added_up_over_iterations(ahead):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            slowly(s.model(x).square().mean()).backward()
            if k % 2:
                s.optimizer.step()
                s.optimizer.zero_grad()

    coexecuted(compare_ahead(network(), step, 20), 8)

    assert sum(ahead) >= 5


@native
def test_a_state_that_goes_from_iteration_to_iteration(ahead):
    def make():
        return SimpleNamespace(cell=nn.GRUCell(3, 4), hidden=torch.zeros(2, 4), losses=[])

    def step(s, k, tape):
        x = torch.randn(2, 3)
        with tape():
            s.cell.zero_grad()
            hidden = s.cell(x, s.hidden)
            loss = slowly(hidden.square().mean())
            loss.backward()
            s.hidden = hidden.detach()
            with torch.no_grad():
                for p in s.cell.parameters():
                    p -= 0.1 * p.grad
            s.losses.append(loss.detach())

    coexecuted(compare_ahead(make, step, 16), 8)

    assert sum(ahead) >= 5


@native
def test_a_gradient_of_the_iteration_before_that_is_kept_and_looked_at(ahead):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            kept = s.model[0].weight.grad
            train(s, slowly(s.model(x).square().mean()))
        s.log.append(kept)
        return None if kept is None or k % 4 else kept.sum().item()

    coexecuted(compare_ahead(network(), step, 16), 8)

    assert sum(ahead) >= 5


@native
def test_a_path_that_is_new_while_the_iteration_before_is_unfinished(ahead):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            out = s.model(x)
            train(s, slowly((out.abs() if k == 9 else out.square()).mean()))
        return torch.rand(1)

    report = compare_ahead(network(), step, 16)

    assert report.fallbacks >= 1
    assert sum(ahead) >= 5


@native
@pytest.mark.parametrize("where", ["in the block", "at its end"])
def test_what_fails_in_the_iteration_before_is_raised_in_the_next_one(ahead, where):
    def make():
        return SimpleNamespace(table=nn.Embedding(4, 3), noise=[])

    def step(s, k, tape):
        index = torch.tensor([0, 1 if k != 9 else 77])
        with tape():
            if where == "in the block" and k == 10:
                s.noise.append(s.table.weight.detach().sum().item())
            before = s.table.weight.grad
            s.table.zero_grad()
            loss = slowly(F.dropout(s.table(index)).sum())
            loss.backward()
            with torch.no_grad():
                s.table.weight -= s.table.weight.grad
            del before
        s.noise.append(torch.rand(1))

    coexec.reset()
    eager = run(make, step, 16, eager_tape, every=16)
    ours = run(make, step, 16, functools.partial(coexec.GradientTape, synchronous=False), every=16)

    assert [k for k, seen in enumerate(eager) if seen.raised] == [9]
    [late] = [k for k, seen in enumerate(ours) if seen.raised]
    assert late in (9, 10)
    assert ours[late].raised == eager[9].raised
    assert ours[-1].state["table"] == eager[-1].state["table"]
    assert any(ahead)


@native
def test_an_exception_that_leaves_a_block_ahead(ahead):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with contextlib.suppress(ValueError), tape():
            s.optimizer.zero_grad()
            slowly(s.model(x).square().mean()).backward()
            if k == 9:
                raise ValueError
            s.optimizer.step()
        return torch.rand(1)

    compare_ahead(network(), step, 16)

    assert sum(ahead) >= 5


@native
def test_explain_in_a_block_ahead_waits(ahead):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            if k == 9:
                coexec.explain()
            train(s, slowly(s.model(x).square().mean()))

    coexecuted(compare_ahead(network(), step, 16), 8)

    assert sum(ahead) >= 5


@native
def test_hooks_parameters_and_functions_that_keep_a_tensor_wait(ahead):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            if k == 9:
                s.log.append(nn.Parameter(s.model[0].weight))
                s.log.append(Twice.apply(s.model[0].weight).detach())
            train(s, slowly(s.model(x).square().mean()))

    compare_ahead(network(), step, 16)

    assert sum(ahead) >= 5


@native
def test_an_interrupt_while_the_iteration_before_is_waited_for(ahead, monkeypatch):
    original = PythonRunner.complete
    interrupts = iter([False] * 4 + [True])

    def complete(self):
        original(self)
        if next(interrupts, False):
            raise KeyboardInterrupt

    monkeypatch.setattr(PythonRunner, "complete", complete)

    def step(s, k, tape):
        with tape():
            train(s, slowly(s.model(torch.ones(5, 4)).square().mean()))

    coexec.reset()
    ours = run(network(), step, 16, functools.partial(coexec.GradientTape, synchronous=False), every=16)
    eager = run(network(), step, 16, eager_tape, every=16)

    assert [seen.raised for seen in ours if seen.raised] == [("KeyboardInterrupt", "")]
    assert ours[-1].state == eager[-1].state
    assert sum(ahead) >= 5


@native
def test_python_code_of_a_block_meets_tensors_that_are_pending(monkeypatch):
    """Its use of them waits for nobody: the thread that it runs on is the one to wait for."""
    use_graphs(monkeypatch.setattr)

    def library_of(block):
        run = function_of(block)

        def compute(inputs):
            time.sleep(0.01)  # until Python has left the block
            return run(inputs)

        return core.Library(compute)

    monkeypatch.setattr(inductor, "library_of", library_of)

    def step(s, k, tape):
        with tape(executor="inductor"):
            s.optimizer.zero_grad()
            loss = s.model(torch.randn(5, 4)).square().mean()
            loss.backward()
            s.optimizer.step()

    report = compare_ahead(network(), step, 12)

    assert coexecuted(report, 6)
    assert not report.causes


class Named(nn.Parameter):
    """A parameter of a class of the user's."""


@native
def test_a_class_given_to_a_parameter_that_is_being_written_stays():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = slowly(s.model(x).square().mean())
            train(s, loss)
        if k == 9:
            s.model.weight.__class__ = Named
        return [type(s.model.weight).__name__ if k >= 9 else "", loss.item()]

    assert coexecuted(compare_ahead(linear, step, 14), 8)
