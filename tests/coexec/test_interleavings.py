"""The two runners meet in orders that the test chooses (Terra, figure 3.4), never by luck."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coexec
from coexec import program_state
from tests.coexec import stepped
from tests.coexec.harness import coexecuted, compare, eager_tape, linear, nothing, train

ORDERS = {
    "python first": stepped.python_first,
    "graph first": stepped.graph_first,
    "one step a message": lambda: stepped.SteppedRunner(itertools.repeat(1)),
    **{f"seed {n}": functools.partial(stepped.seeded, n) for n in range(6)},
}
EACH_ORDER = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def figure_3_4(s, k, tape):
    """opA's output is printed before Python feeds what it made of it to opB, which does not read opA's."""
    x = torch.randn(4)
    with tape():
        a = x.exp()
        fetched = a.numpy().sum()
        print(fetched)
        fed = torch.tensor(np.full(4, fetched * (k + 1), dtype=np.float32))
        b = fed * 2
        number = b.sum().item()
        c = x * (number + 0.5)
    return a, b, c


@EACH_ORDER
def test_figure_3_4_does_not_deadlock_in_any_order(use_runner, order):
    use_runner(order)

    assert coexecuted(compare(nothing, figure_3_4, 8), 5)


def log_of_the_last_iteration(use_runner, order, step, steps=6):
    runners = []

    def make():
        runners.append(order())
        return runners[-1]

    use_runner(make)
    report = compare(nothing, step, steps)
    assert coexecuted(report, 2)
    [runner] = runners
    begins = [i for i, entry in enumerate(runner.log) if entry == ("begin",)]
    return runner.log[begins[-1] :]


def test_when_the_graph_is_ahead_values_are_there_before_python_asks(use_runner):
    log = log_of_the_last_iteration(use_runner, stepped.graph_first, figure_3_4)

    assert log.index(("published", 0)) < log.index(("python waits", 0))
    assert log.index(("published", 1)) < log.index(("python waits", 1))


def test_when_python_is_ahead_it_waits_for_values_before_they_are_computed(use_runner):
    log = log_of_the_last_iteration(use_runner, stepped.python_first, figure_3_4)

    assert log.index(("python waits", 0)) < log.index(("call", "aten.exp.default"))
    assert log.index(("call", "aten.exp.default")) < log.index(("published", 0))
    assert log.index(("published", 0)) < log.index(("python waits", 1))
    assert log.index(("python waits", 1)) < log.index(("published", 1))


def test_nothing_external_is_written_before_the_commit(use_runner):
    def step(s, k, tape):
        x = torch.randn(4)
        with tape():
            x.add_(1)
            y = x * 2
        return x, y

    log = log_of_the_last_iteration(use_runner, stepped.graph_first, step)

    assert log.index(("commit",)) < log.index(("call", "aten.add_.Tensor"))


@EACH_ORDER
def test_training_with_fetches_branches_and_feeds(use_runner, order, patient):
    use_runner(order)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            h = h * 2 if h.sum() > 0 else h - 1
            if k % 3 == 2:
                h = h + abs(h.max().item()) + 3
            loss = h.pow(2).mean()
            s.log.append(loss.item())
            train(s, loss)
            print(s.model.weight.grad.norm())

    assert coexecuted(compare(linear, step, 22), 5)


@EACH_ORDER
@pytest.mark.parametrize("leave", ["new path", "exception", "kept"])
def test_an_iteration_is_given_up_at_any_point_of_the_graph(use_runner, order, leave):
    use_runner(order)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(torch.nn.functional.dropout(x, 0.3))
            print(h.sum().item())
            if k == 5 and leave == "new path":
                h = h * 2
            loss = h.pow(2).mean()
            train(s, loss)
            if k == 5 and leave == "exception":
                raise ValueError("mine")
            if k == 5 and leave == "kept":
                s.kept = h.detach()
            del h, loss

    assert coexecuted(compare(linear, step, 9), 4)


@EACH_ORDER
def test_writes_to_inputs_and_parameters_around_fetches(use_runner, order):
    use_runner(order)

    def step(s, k, tape):
        x = torch.randn(3, 4)
        with tape():
            x.mul_(2)
            print(x.sum())
            x[0] = s.model.bias.detach().sum()
            with torch.no_grad():
                s.model.bias.add_(x.mean())
                print(s.model.bias)
                s.model.weight.mul_(0.9)
            y = s.model(x).detach()
            x.zero_()
        return x, y

    assert coexecuted(compare(linear, step, 8), 5)


@pytest.mark.parametrize(
    "order",
    [
        stepped.python_first,
        stepped.graph_first,
    ],
)
def test_a_small_state_is_read_written_and_looked_at(use_runner, order):
    use_runner(order)

    def step(s, k, tape):
        with tape():
            y = s.state * 2
            s.state.add_(1)
            print(s.state)
        return y

    assert coexecuted(compare(lambda: SimpleNamespace(state=torch.zeros(2)), step, 8), 5)


@EACH_ORDER
def test_random_numbers_that_python_looks_at(use_runner, order):
    use_runner(order)

    def step(s, k, tape):
        with tape():
            a = torch.randn(3)
            print(a)
            b = torch.rand(2)
            if k in (4, 6):
                b = b + torch.rand(2)
            c = torch.randint(0, 9, (2,))
        return b, c

    assert coexecuted(compare(nothing, step, 9), 4)


def test_an_interrupt_while_python_waits_for_the_commit(monkeypatch):
    waits = itertools.count()
    original = program_state.make_graph_runner

    def make():
        runner = original()
        wait = runner.wait

        def interrupted():
            if next(waits) == 2:
                raise KeyboardInterrupt
            wait()

        runner.wait = interrupted
        return runner

    monkeypatch.setattr(program_state, "make_graph_runner", make)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    state, raised = linear(), []
    for k in range(9):
        try:
            step(state, k, functools.partial(coexec.GradientTape, synchronous=True))
        except BaseException as e:
            raised.append(type(e))

    assert raised == [KeyboardInterrupt]
    assert coexecuted(coexec.explain().programs[0], 4)


def test_an_interrupt_while_python_waits_for_a_value(monkeypatch):
    fetches = itertools.count()
    original = program_state.make_graph_runner

    def make():
        runner = original()
        fetch = runner.fetch

        def interrupted(slot):
            if next(fetches) == 2:
                raise KeyboardInterrupt
            return fetch(slot)

        runner.fetch = interrupted
        runner.watched = True  # its values are fetched by Python
        return runner

    def step(s, k, tape, interrupt_at=None):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            if k == interrupt_at:
                raise KeyboardInterrupt
            s.log.append(loss.item())
            train(s, loss)

    def final(tape, interrupt_at):
        torch.manual_seed(0)
        s, raised = linear(), []
        for k in range(9):
            try:
                step(s, k, tape, interrupt_at)
            except KeyboardInterrupt:
                raised.append(k)
        return s, raised

    monkeypatch.setattr(program_state, "make_graph_runner", make)
    mine, raised = final(coexec.GradientTape, None)
    eager, _ = final(eager_tape, raised[0])
    assert len(raised) == 1
    assert mine.log == eager.log
    assert torch.equal(mine.model.weight, eager.model.weight)
