"""What programs for a compiler are made of, run as if compiled: see `tests.coexec.uncompiled`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coexec
from coexec._native import core
from coexec.executors import inductor
from tests.coexec.harness import compare, linear, nothing, train
from tests.coexec.uncompiled import library_of, use_graphs

pytestmark = pytest.mark.skipif(core is None, reason="compiled blocks need the native module")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    use_graphs(monkeypatch.setattr)


def ran_by(make, step, steps=12):
    """The executors of a program's blocks; the program equals eager."""
    report = compare(make, step, steps, executor="inductor")
    assert report.steps["co-execution"] >= 3, report.summary()
    return {b.executor for b in report.blocks}


def of_a_shadow(b, k):
    v = b[0]
    z = b.sum() * 2 if k % 2 else b.sum() * 3
    v.add_(1)
    return b.sum() + 0 * z


def of_a_result(b, k):
    return of_a_shadow(b * 2, k)


def of_a_transposed_view(b, k):
    y = b * 2
    v = y.t()[1:]
    z = v.sum() * 2 if k % 2 else v.sum() * 3
    y.add_(1)
    w = v.sum() * 2 if k % 3 else v.sum() * 4
    y.mul_(2)
    return v.sum() + z + w


def of_one_of_two(b, k):
    a, c = b * 2, b * 3
    y = a if k % 2 else c
    y.add_(1)
    return a.sum() + 2 * c.sum()


def of_one_of_two_in_one_block(b, k):
    a, c = b * 2, b * 3
    y = a if k % 2 else c
    z = y.sum() * 2 if k % 3 else y.sum() * 3
    c.mul_(2)
    y.add_(1)
    return a.sum() + 2 * c.sum() + z


SHARED = {
    of_a_shadow: {"inductor"},
    of_a_result: {"inductor"},
    of_a_transposed_view: {"inductor"},
    of_one_of_two: {"inductor", "aten"},
    of_one_of_two_in_one_block: {"inductor", "aten"},
}


def tables():
    return SimpleNamespace(b=torch.arange(9.0).view(3, 3), log=[])


@pytest.mark.parametrize("compute", SHARED)
def test_blocks_make_the_views_that_they_use_and_leave_memory_with_several_names_to_aten(compute):
    def step(s, k, tape):
        with tape():
            s.log.append(compute(s.b, k).item())

    assert ran_by(tables, step) == SHARED[compute]


def without_one_of_three(layers, k, x):
    for index in range(3):
        if index != k % 3:
            x = x + layers[index](x).tanh()
    return x.square().mean()


def test_layers_that_are_chosen_are_updated_in_compiled_blocks():
    def make():
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        return SimpleNamespace(layers=layers, optimizer=torch.optim.SGD(layers.parameters(), lr=0.05))

    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            train(s, without_one_of_three(s.layers, k, x))

    assert ran_by(make, step, 18) == {"inductor"}


@pytest.mark.parametrize("kind", ["momentum", "RMSprop", "Adagrad", "moving average"])
def test_layers_whose_optimizer_has_made_its_state_on_some_paths_only_are_compiled(kind, patient):
    def make():
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        optimizers = {
            "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5),
            "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
        }
        optimizer = optimizers.get(kind, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
        averages = [torch.zeros_like(p) for p in layers.parameters()]
        return SimpleNamespace(layers=layers, optimizer=optimizer(layers.parameters()), averages=averages)

    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            train(s, without_one_of_three(s.layers, k, x))
            if kind == "moving average":
                with torch.no_grad():
                    for average, p in zip(s.averages, s.layers.parameters(), strict=True):
                        average.lerp_(p, 0.1)

    assert "inductor" in ran_by(make, step, 24)


VARYING = {
    "a probability": lambda x, k: torch.empty(4).bernoulli_(0.1 * (k % 5 + 1)) * x,
    "an index": lambda x, k: x.select(0, k % 4) * 2,
    "a momentum": lambda x, k: torch.nn.functional.batch_norm(
        x.view(2, 2), torch.zeros(2), torch.ones(2), training=True, momentum=0.1 * (k % 5 + 1)
    ).sum(),
}


@pytest.mark.parametrize("name", VARYING)
def test_blocks_are_parted_at_a_call_with_a_number_that_no_compiler_takes(name):
    def step(s, k, tape):
        x = torch.randn(4)
        with tape():
            y = VARYING[name](x * 2, k) + 1
            s.log.append(y.sum().item())

    assert ran_by(nothing, step, 14) == {"inductor", "aten"}


KEPT = {
    "an index": lambda b, k: b[k % 3],
    "a selection": lambda b, k: b.select(0, k % 3),
    "of a result": lambda b, k: (b * 2).select(0, k % 3),
    "written": lambda b, k: b.select(0, k % 3).mul_(0.5),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_view_at_a_place_that_varies_is_kept(name):
    def step(s, k, tape):
        with tape():
            h = s.b.sum() * 2
            h.item()
            s.kept = KEPT[name](s.b, k)
        s.log.append(s.kept.clone())

    ran_by(tables, step, 14)


def test_what_comes_before_a_feed_is_computed_before_a_block_waits_for_it(monkeypatch):
    blocks = []
    monkeypatch.setattr(inductor, "library_of", lambda block: blocks.append(block) or library_of(block))

    def make():
        torch.manual_seed(0)
        return SimpleNamespace(w=torch.randn(4, 4))

    def step(s, k, tape):
        x, y = torch.randn(4, 4), torch.randn(4)
        with tape():
            hidden = torch.mm(x, s.w).relu()
            out = torch.mm(hidden, s.w)
            return [(out.sum(1) - y).square().sum().item()]

    assert ran_by(make, step) == {"inductor"}
    feeds = blocks[-1].module.graph.find_nodes(op="call_function", target=torch.ops.coexec.feed.default)
    first, second = feeds
    assert first.args[1].op == "placeholder"  # the token: nothing long comes before
    products = blocks[-1].module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert second.args[1] is products[-1]


@pytest.mark.parametrize("others", [False, True], ids=["dropout alone", "and a uniform number"])
def test_dropout_is_drawn_several_numbers_at_a_time_where_nothing_else_is_drawn_in_between(
    others, monkeypatch
):
    blocks = []
    monkeypatch.setattr(inductor, "library_of", lambda block: blocks.append(block) or library_of(block))

    def make():
        torch.manual_seed(0)
        return SimpleNamespace(w=torch.randn(4, 4), log=[])

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = torch.nn.functional.dropout(x @ s.w, 0.4)
            h = h + torch.rand_like(h) if others else h
            s.log.append(torch.nn.functional.dropout(h, 0.1).sum().item())

    assert ran_by(make, step) == {"inductor"}
    graph = blocks[-1].module.graph
    theirs = graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli_.float)
    own = graph.find_nodes(op="call_function", target=torch.ops.coexec.bernoulli.default)
    assert (len(theirs), len(own)) == ((2, 0) if others else (0, 2))
    if own:
        first, second = own
        assert second.args[0].args == (first, 0), "a token has the draws in order"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_what_keeps_kernel_threads_asleep_is_gone_when_no_iteration_runs():
    def make():
        return SimpleNamespace(w=torch.ones(4), threads=[])

    def step(s, k, tape):
        with tape():
            value = (s.w * k).sum().item()
            s.threads.append(len(os.listdir("/proc/self/task")))
        return [value]

    state = make()
    for k in range(12):
        step(state, k, lambda: coexec.GradientTape(executor="inductor"))
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) >= max(state.threads) and time.monotonic() < deadline:
        time.sleep(0.05)

    [report] = coexec.explain().programs
    assert {b.executor for b in report.blocks} == {"inductor"}
    assert len(os.listdir("/proc/self/task")) < max(state.threads)
    assert step(state, 5, lambda: coexec.GradientTape(executor="inductor")) == [20.0]


@pytest.mark.parametrize("again", [False, True])
def test_what_is_put_off_behind_a_place_that_varies_comes_behind_it(again):
    """An item whose index varies is assigned as it is, behind the library of what else is put off."""

    def make():
        return SimpleNamespace(**vars(linear()), memory=torch.zeros(3))

    def step(s, k, tape):
        x = torch.randn(4, 4)
        with tape():
            s.memory.mul_(0.9)
            s.memory[k % 3] = x.mean()
            if again:
                s.memory.add_(1.0)
            train(s, s.model(x).square().mean())

    assert "inductor" in ran_by(make, step)


def test_a_graph_whose_blocks_are_on_disk_is_divided_once(monkeypatch):
    divided, original = [], inductor.divide
    monkeypatch.setattr(inductor, "divide", lambda graph: divided.append(graph) or original(graph))
    monkeypatch.setattr(inductor, "missing", lambda _: [])
    monkeypatch.setattr(coexec.options, "background", True)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            s.log.append(s.model(x).sum().item())

    assert ran_by(linear, step) == {"inductor"}
    assert len(divided) == 1
