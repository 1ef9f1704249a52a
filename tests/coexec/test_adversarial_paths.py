"""Paths that part and meet again: what a node reads depends on the way that led to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from coexec._native import core
from tests.coexec.harness import coexecuted, compare, linear, native, nothing, train, weights

SAME = (
    "after a call that returns the same memory, two nodes differ only in what they read: the first is taken"
)


def test_a_detached_result_of_either_branch_is_an_optional_argument():
    def step(s, k, tape):
        x, w, b = torch.randn(1, 1, 4), torch.randn(1, 1, 2), torch.randn(1)
        with tape():
            b = b * 2 if k % 2 else b - 1
            return F.conv1d(x, w, b.detach())

    compare(nothing, step, 10)


def test_a_detached_result_of_either_branch_is_looked_at():
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            x = x * 2 if k % 2 else x - 1
            print(x.detach().numpy())

    compare(nothing, step, 10)


def test_a_detached_result_of_either_branch_is_computed_with():
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            x = x * 2 if k % 2 else x - 1
            return x.detach() + 1

    report = compare(nothing, step, 12)

    assert coexecuted(report)
    assert report.fallbacks <= 2


def test_branches_meet_in_every_kind_of_node(compared):
    def step(s, k, tape):
        x = torch.randn(3, 3)
        with tape():
            y = x * 2 if k % 2 else x.exp()
            view = y.view(9)
            view.add_(1)
            print(y.sum())
            z = torch.cat([y, x])
            y.mul_(3)
        return y, view, z

    assert coexecuted(compared(nothing, step, 12), 6)


def test_an_input_is_fed_or_computed(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x if k % 3 else x * 2
            z = y + 1
            y.add_(5)
            print(z)
        return x, y, z

    assert coexecuted(compared(nothing, step, 12), 5)


def test_a_parameter_of_two_is_used(compared):
    def step(s, k, tape):
        with tape():
            w = s.a if k % 2 else s.b
            s.a.grad = s.b.grad = None
            w.exp().sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad

    assert coexecuted(compared(weights("a", "b"), step, 12), 6)


def test_a_parameter_that_only_some_iterations_use(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            if k % 3 == 1:
                h = h * s.gain
            s.gain.grad = None
            train(s, h.pow(2).mean())

    def make():
        s = linear()
        s.gain = torch.nn.Parameter(torch.ones(3))
        return s

    assert coexecuted(compared(make, step, 14), 6)


def test_a_state_is_written_on_one_path_only(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            if k % 2:
                s.state.add_(x)
                print(s.state)
            y = s.state * 2
        return y

    assert coexecuted(compared(lambda: SimpleNamespace(state=torch.zeros(3)), step, 12), 6)


def test_an_input_is_written_on_one_path_only(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            if k % 2:
                x.add_(1)
                print(x)
            y = x * 2
        return x, y

    assert coexecuted(compared(nothing, step, 12), 6)


def test_an_iteration_ends_at_any_place(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            x.add_(1)
            if k % 4 == 1:
                return x
            y = x * 2
            if k % 4 == 2:
                return y
            print(y.sum())
            s.state.add_(y)
        return y

    assert coexecuted(compared(lambda: SimpleNamespace(state=torch.zeros(3)), step, 20), 8)


def test_an_empty_block(compared):
    def step(s, k, tape):
        with tape():
            pass

    compared(nothing, step, 6)


def test_a_block_without_torch_calls_in_some_iterations(compared):
    def step(s, k, tape):
        with tape():
            if k % 2:
                s.state.add_(1)

    assert coexecuted(compared(lambda: SimpleNamespace(state=torch.zeros(3)), step, 10), 4)


def test_one_line_called_from_several_places(compared):
    def step(s, k, tape):
        def twice(x):
            return x * 2

        x = torch.randn(3)
        with tape():
            y = twice(twice(x) + 1)
            if k % 3:
                y = twice(y)
            for _ in range(2 + k % 2):
                y = twice(y) - 1
        return y

    assert coexecuted(compared(nothing, step, 16), 6)


def test_dropping_and_keeping_take_turns(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x * 2
            z = y + 1
            if k % 2:
                del y
                y = None
        return y, z

    assert coexecuted(compared(nothing, step, 12), 6)


@native
def test_more_paths_than_are_worth_it_are_run_call_by_call():
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            for bit in range(7):
                x = x * 2 if k >> bit & 1 else x.exp().clamp(max=3.0)
                if k == bit:
                    x = x + 1
            loss = (x * s.w).sum()
            s.w.grad = None
            loss.backward()

    report = compare(weights("w"), step, 70)

    assert report.phase == "dynamic"
    assert report.dynamic_cause.startswith(("CX0116", "CX0117"))


def test_an_integer_tensor_that_is_passed_on_is_not_looked_at(compared):
    def step(s, k, tape):
        labels = torch.randint(0, 3, (5,))
        with tape():
            train(s, F.cross_entropy(s.model(torch.randn(5, 4)), labels.cpu().long().contiguous()))

    assert coexecuted(compared(linear, step, 8), 4)


def test_a_layer_that_always_was_the_second_may_be_the_first(compared):
    used = [(0, 2), (1, 2), (0, 2), (1, 2), (2, 3), (0, 3), (2, 3), (1, 3)]

    def make():
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        return SimpleNamespace(model=layers, optimizer=torch.optim.SGD(layers.parameters(), lr=0.1))

    def step(s, k, tape):
        x = torch.randn(5, 3)
        with tape():
            for i, layer in enumerate(s.model):
                if i in used[k % len(used)]:
                    x = x + layer(x).tanh()
            train(s, x.square().mean())

    report = compared(make, step, 24)

    assert report.fallbacks == 0, report.summary()
    assert coexecuted(report, 18)


def test_known_events_in_a_new_order_are_no_sign_that_a_program_has_no_graph():
    looks = ["abcd", "abcd", "abcd", "ac", "bd", "ad", "c", ""]

    def step(s, k, tape):
        x = torch.randn(5)
        now = looks[min(k, len(looks) - 1)]
        with tape():
            y = x.sum()
            if "a" in now:
                s.log.append(y.item())
            if "b" in now:
                s.log.append(y.item())
            if "c" in now:
                s.log.append(y.item())
            if "d" in now:
                s.log.append(y.item())

    report = compare(nothing, step, 12)

    assert report.fallbacks > 2, report.summary()
    assert report.phase == "co-execution"


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_a_program_that_only_falls_back_at_first_is_run_call_by_call(monkeypatch):
    monkeypatch.setattr("coexec.program_state.MAX_IN_ROW", 0)  # each fallback counts

    def step(s, k, tape):
        x = torch.randn(8)
        with tape():
            loss = (x.roll(max(k - 1, 0)) * s.w[:1]).sum()
            s.w.grad = None
            loss.backward()

    report = compare(weights("w"), step, 12)

    assert report.phase == "dynamic"
    assert report.fallbacks == 2, report.summary()


def test_gradients_that_are_zeroed_in_place_and_clipped_under_ragged_batches(compared_on_the_graph):
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return SimpleNamespace(model=model, optimizer=optimizer, memory=torch.zeros(3))

    def step(s, k, tape):
        x = torch.randn(3 if k % 4 == 3 else 4, 3)
        with tape():
            h = s.model(x)
            loss = (h - x).square().mean() + x.sum().tanh()
            s.optimizer.zero_grad(set_to_none=False)
            loss.backward()
            torch.nn.utils.clip_grad_value_(list(s.model.parameters()), 0.1)
            s.optimizer.step()
            s.memory[k % 3] = h.mean().detach()

    compared_on_the_graph(make, step, 12)


def test_what_a_call_passes_on_is_that_of_the_path():
    """`detach` makes no memory: who reads its result reads what it was called on, on each path another."""

    def make():
        return SimpleNamespace(weight=torch.randn(3, 3), memory=torch.zeros(()), log=[])

    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            h = x @ s.weight
            value = h.mean() if k % 8 != 5 else h.square().sum()
            passed_on = value.detach()
            if k % 9 == 8:
                s.memory.add_(passed_on)
            s.log.append(passed_on.item())

    report = compare(make, step, 60)

    # One for each of the two, and none when both are met together in step 53.
    assert report.fallbacks == 2, report.summary()
    assert report.steps["co-execution"] >= 50


VIEWS = {
    "t": lambda v: v.t(),
    "expand": lambda v: v.expand(2, 3, 3),
    "row": lambda v: v[1],
    "view": lambda v: v.view(9),
    "slice": lambda v: v[:2],
    "detach": lambda v: v.detach(),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_of_what_its_own_call_was_given(name, requires_grad):
    """In some traces two calls made the same view of the same memory, and one was taken for the other."""

    def make():
        return SimpleNamespace(c=torch.ones(3, 3, requires_grad=requires_grad), log=[])

    def step(s, k, tape):
        x = torch.randn(3, 3)
        with tape():
            v = x * 0.5 if (k >> 1) & 1 else s.c
            r = VIEWS[name](v).sum()
            if k % 2:
                r = r + VIEWS[name](s.c).sum()
            if r.requires_grad:
                s.c.grad = None
                r.backward()
            s.log.append(r.item())

    compare(make, step, 16)
