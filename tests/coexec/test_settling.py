"""Blocks are compiled once the graph has served for as many iterations as there were fallbacks before."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import coexec
from coexec._native import core
from tests.coexec.harness import compare, linear, train
from tests.coexec.uncompiled import use_graphs

pytestmark = pytest.mark.skipif(core is None, reason="compiled blocks need the native module")

WAYS = [torch.square, torch.tanh, torch.sigmoid, torch.relu, torch.sin]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    use_graphs(monkeypatch.setattr)


def run(schedule):
    """Equality with eager; after each step, which executor has the blocks, and how long it waits for more."""
    seen = {}

    def step(state, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = state.model(x)
            loss = (WAYS[schedule[k]](h) + h).square().mean()
            train(state, loss)
        programs = coexec.explain().programs
        if programs and programs[0].blocks:
            [executor] = {b.executor for b in programs[0].blocks}
            seen[k] = executor, programs[0].unsettled
        return loss

    report = compare(linear, step, len(schedule), executor="inductor")
    assert report.steps["co-execution"] > 0
    return report, seen


def test_the_first_graph_and_that_after_the_first_fallback_are_compiled_at_once():
    report, seen = run([0, 0, 0, 0, 1, 1])
    assert report.fallbacks == 1
    assert seen[3] == seen[4] == seen[5] == ("inductor", 0)


def test_after_each_further_fallback_a_graph_serves_for_one_iteration_more():
    schedule = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0]
    report, seen = run(schedule)
    assert report.fallbacks == 3
    assert seen[6] == ("aten", 1)  # fell back
    assert seen[8] == ("inductor", 0)
    assert seen[9] == ("aten", 2)  # fell back
    assert seen[12] == seen[13] == ("inductor", 0)


def test_a_fallback_begins_the_wait_anew():
    report, seen = run([0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4])
    assert report.fallbacks == 4
    assert [seen[k][1] for k in (6, 7, 8, 9, 10)] == [1, 2, 1, 3, 2]
    assert {seen[k][0] for k in (6, 7, 8, 9, 10)} == {"aten"}
    assert seen[14] == ("inductor", 0)


def test_nothing_waits_where_nothing_is_compiled():
    schedule = [0, 0, 0, 0, 1, 1, 2, 2, 2]

    def step(state, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = WAYS[schedule[k]](state.model(x)).square().mean()
            train(state, loss)
        assert all(p.unsettled == 0 for p in coexec.explain().programs)
        return loss

    assert compare(linear, step, len(schedule)).fallbacks == 2


def test_the_report_says_what_compiling_waits_for():
    state = linear()
    tape = partial(coexec.GradientTape, executor="inductor")
    for way in (0, 0, 0, 0, 1, 1, 2):
        x = torch.randn(5, 4)
        with tape():
            train(state, WAYS[way](state.model(x)).square().mean())
    assert "compiled after 1 more iterations without a fallback" in str(coexec.explain())
