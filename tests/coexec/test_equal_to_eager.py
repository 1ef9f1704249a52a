"""What the two phases and every way out of them promise: eager's results, effects and exceptions.

Each program runs on the native and on the interpreted GraphRunner, and lazily; `test_interleavings.py`
runs those in which the two runners meet in orders that the test chooses.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import coexecuted, linear, nothing, train, weights

STEPS = pytest.mark.parametrize("at", [2, 3, 6])


def test_an_ordinary_training_step(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            train(s, loss)
        return loss.detach()

    report = compared(linear, step, 10)

    assert coexecuted(report, 6)
    assert report.traces <= 4
    assert report.fallbacks == 0


@STEPS
@pytest.mark.parametrize("where", ["before fetches", "between fetches", "after fetches"])
def test_a_new_path(compared_on_the_graph, where, at):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            if k == at and where == "before fetches":
                h = h * 2
            print(h.sum().item())
            if k == at and where == "between fetches":
                h = h + torch.randn(5, 3)
            loss = h.pow(2).mean()
            print(loss.item())
            if k == at and where == "after fetches":
                loss = loss * 3
            train(s, loss)

    report = compared_on_the_graph(linear, step, 11)

    assert coexecuted(report, 4)
    assert report.fallbacks == (0 if at == 2 else 1)


def test_a_path_becomes_part_of_the_graph(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            h = h * 2 if k % 3 == 2 else h.exp()
            train(s, h.pow(2).mean())

    report = compared(linear, step, 14)

    assert coexecuted(report, 8)
    assert report.steps["co-execution"] == 14 - report.traces
    assert report.traces <= 5


class Mine(Exception):
    pass


@STEPS
@pytest.mark.parametrize("where", ["first", "after the forward pass", "after a fetch", "after the update"])
def test_an_exception_of_the_users_code_leaves_the_block_and_training_goes_on(compared, where, at):
    def step(s, k, tape):
        def maybe(place):
            if k == at and place == where:
                s.log.append(place)
                raise Mine(f"at step {k}")

        x = torch.randn(5, 4)
        with tape():
            maybe("first")
            loss = s.model(x).pow(2).mean()
            maybe("after the forward pass")
            print(loss.item())
            maybe("after a fetch")
            train(s, loss)
            maybe("after the update")

    report = compared(linear, step, 11)

    assert coexecuted(report, 4)


@STEPS
def test_a_tensor_is_kept_for_the_first_time(compared_on_the_graph, at):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            loss = h.pow(2).mean()
            train(s, loss)
            if k == at:
                s.kept = h.detach()
            del h, loss

    report = compared_on_the_graph(linear, step, 10)

    assert coexecuted(report, 4)
    assert report.fallbacks == (0 if at == 2 else 1)


def test_a_kept_tensor_is_an_ordinary_one_after_the_block(compared):
    def step(s, k, tape):
        with tape():
            y = torch.randn(3) * 2
        s.log.append((y + 1, y.tolist()))
        y.add_(1)
        y.requires_grad_()
        (y * y).sum().backward()
        return y

    assert coexecuted(compared(nothing, step, 8), 5)


LOOKS = {
    "print": lambda t: print(t),
    "float": lambda t: print(float(t)),
    "int": lambda t: print(int(t)),
    "bool": lambda t: print(bool(t)),
    "complex": lambda t: print(complex(t)),
    "item": lambda t: print(t.item()),
    "tolist": lambda t: print(t.tolist()),
    "numpy": lambda t: print(t.numpy()),
    "asarray": lambda t: print(np.asarray(t) + 1),
    "f-string": lambda t: print(f"{t} {t:.3f} {t!r} {t!s}"),
    "format": lambda t: print(f"{t:8.2e}"),
    "condition": lambda t: print("large" if t > 0.5 else "small"),
    "equal": lambda t: print(torch.equal(t, t * 1), torch.allclose(t, t + 1), t == t, 0.5 in t),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_value_is_looked_at_in_the_middle(compared, look):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            look(loss.detach())
            train(s, loss)
            look(loss.detach())

    assert coexecuted(compared(linear, step, 9), 4)


def test_printed_tensors_show_their_history(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            loss = y.pow(2).mean()
            print(y, y[0], loss, f"{loss}", repr(s.model.weight), s.model.weight.grad)
            train(s, loss)
            print(loss, s.model.weight.grad, s.model.bias, s.model.weight.detach() * 1)

    assert coexecuted(compared(linear, step, 9), 4)


def test_a_branch_on_a_value(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            h = h * 2 if h.sum() > 0 else h - 1
            train(s, h.pow(2).mean())

    assert coexecuted(compared(linear, step, 16), 6)


@pytest.mark.parametrize("convert", [torch.tensor, torch.as_tensor, torch.from_numpy])
def test_a_value_of_numpy_that_depends_on_a_fetch_is_fed(compared, convert):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            seen = y.detach().numpy().sum(axis=0)
            scale = convert(np.tanh(seen) + k)
            z = torch.randn(5, 3) * scale + abs(float(seen[0])) + 3
            train(s, (y * z).mean())
        return z

    assert coexecuted(compared(linear, step, 9), 4)


def test_a_parameter_is_read_right_after_the_block(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())
        print(s.model.weight, s.model.bias.sum().item(), s.model.weight.grad.norm())
        return s.model.weight.detach().clone()

    assert coexecuted(compared(linear, step, 9), 5)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0
        self.seen = []
        self.gain = 1.0

    def forward(self, x):
        self.calls += 1
        y = self.layer(x) * self.gain
        self.gain = 1.0 + 0.25 * (self.calls % 3)
        self.seen.append(round(y.detach().mean().item(), 3))
        return y


def test_attributes_are_mutated_by_python_during_the_step(compared):
    def make():
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return SimpleNamespace(model=model, optimizer=optimizer)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())
        s.calls, s.seen, s.gain = s.model.calls, list(s.model.seen), s.model.gain

    assert coexecuted(compared(make, step, 12), 4)


def test_two_tapes_at_two_places(compared):
    def make():
        return SimpleNamespace(a=linear(), b=linear(lr=0.2))

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s.a, s.a.model(x).pow(2).mean())
        with tape():
            train(s.b, (s.b.model(x) - s.a.model(x).detach()).pow(2).mean())

    for report in compared(make, step, 9, programs=2):
        assert coexecuted(report, 5)


@pytest.mark.parametrize("keys", [True, False])
def test_two_models_at_one_place(compared, keys):
    def make():
        return SimpleNamespace(models=[linear(), linear(lr=0.2)])

    def step(s, k, tape):
        for index, m in enumerate(s.models):
            x = torch.randn(5, 4)
            with tape(key=index) if keys else tape():
                train(m, m.model(x).pow(2).mean())

    for report in compared(make, step, 9, programs=2 if keys else 1):
        assert coexecuted(report, 5)
        assert not keys or report.key.endswith(("[0]", "[1]"))


def test_a_tape_inside_of_a_tape_belongs_to_the_outer_one(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            with tape():
                loss = y.pow(2).mean()
            train(s, loss)

    assert coexecuted(compared(linear, step, 9), 5)


def test_a_step_under_no_grad(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with torch.no_grad(), tape():
            y = s.model(x)
            s.model.bias.add_(y.mean(0))
            print(y)
        return y

    assert coexecuted(compared(linear, step, 9), 5)


def test_no_grad_and_grad_take_turns(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with torch.set_grad_enabled(k % 3 != 2), tape():
            loss = s.model(x).pow(2).mean()
            if loss.requires_grad:
                train(s, loss)
        return loss.detach()

    assert coexecuted(compared(linear, step, 12), 5)


@STEPS
def test_a_keyboard_interrupt_in_a_step(compared, at):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            print(loss.item())
            if k == at:
                raise KeyboardInterrupt
            train(s, loss)

    assert coexecuted(compared(linear, step, 10), 4)


def test_the_number_of_threads_is_the_main_threads(compared):
    torch.set_num_threads(2)

    def step(s, k, tape):
        x = torch.randn(300, 300)
        with tape():
            x = x * 2
            y = (x @ x).sum() + torch.logsumexp(x.flatten(), 0)
            print(y)
        return y

    assert coexecuted(compared(nothing, step, 6), 3)


def test_a_program_that_is_left_alone_is_eager(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    coexec.reset()
    torch.manual_seed(0)
    s = linear()
    for k in range(4):
        step(s, k, lambda: coexec.GradientTape(mode="eager"))

    assert coexec.explain().programs == ()


def test_gradients_outside_of_a_block_are_an_error():
    tape = coexec.GradientTape()

    with pytest.raises(coexec.TapeError, match="inside of the tape's with block"):
        tape.gradient(torch.ones(()), [])


def test_a_tape_is_used_once_at_a_time():
    with coexec.GradientTape() as tape:
        with pytest.raises(coexec.TapeError, match="make a new GradientTape"):
            tape.__enter__()


def test_a_leaf_gets_its_gradient(compared):
    def step(s, k, tape):
        x = torch.randn(3, requires_grad=True)
        with tape():
            (x * s.w).sum().backward()
            s.w.grad = None
        return x

    assert coexecuted(compared(weights("w"), step, 8), 4)
