"""What no iteration has done for long is no part of compiled graphs, until one does it after all."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

import coexec
from coexec import program_state
from coexec._native import core
from coexec.programs import all_states
from coexec.tracegraph.live import live
from coexec.tracegraph.verify import verify_graph
from tests.coexec.harness import coexecuted, compare, eager_tape, linear, train
from tests.coexec.uncompiled import use_graphs

pytestmark = pytest.mark.skipif(core is None, reason="compiled blocks need the native module")

AFTER = 12
STEPS = AFTER + 12


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    use_graphs(monkeypatch.setattr)
    monkeypatch.setattr(program_state, "NARROW_AFTER", AFTER)


def program(is_other):
    """A step that takes another path, and reads the result of another event, if `is_other(k)`."""

    def step(state, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = state.model(x)
            y = h
            if is_other(k):
                y = torch.tanh(h * (1.0 + k))
            loss = (h + y).square().mean()
            train(state, loss)
        return loss

    return step


def run(is_other, steps=STEPS, **options):
    report = compare(linear, program(is_other), steps, executor="inductor", **options)
    assert coexecuted(report)
    return report


def run_closely(make, is_other, **options):
    """As `run`, for what rounds otherwise than eager."""
    seen = []
    for tape in (eager_tape, partial(coexec.GradientTape, executor="inductor", **options)):
        torch.manual_seed(0)
        state = make()
        for k in range(STEPS):
            loss = program(is_other)(state, k, tape)
        seen.append([loss, *(p.detach() for p in state.model.parameters())])
    for mine, eagers in zip(*seen, strict=True):
        torch.testing.assert_close(mine, eagers)
    [report] = coexec.explain().programs
    return report


def blocks(report):
    return len(report.blocks)


def test_what_a_program_did_at_its_beginning_parts_no_blocks_later_on():
    early = run(lambda k: k in (0, 2), steps=AFTER)
    late = run(lambda k: k in (0, 2))

    assert blocks(late) < blocks(early)
    assert blocks(late) == blocks(run(lambda k: False))
    assert late.fallbacks == early.fallbacks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iteration_that_runs_ahead_waits_for_the_smaller_graph(monkeypatch):
    monkeypatch.undo()  # stand-ins for compiled blocks need Python, which may be waiting for them
    monkeypatch.setattr(program_state, "NARROW_AFTER", AFTER)
    monkeypatch.setattr(coexec.options, "background", False)
    report = run_closely(linear, lambda k: k in (0, 2), synchronous=False)

    assert coexecuted(report, at_least=STEPS // 2)
    assert blocks(report) == 2  # the iteration, and its commit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_blocks_remain_as_they_are_until_those_of_the_smaller_graph_are_compiled(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(program_state, "NARROW_AFTER", AFTER)
    monkeypatch.setattr(coexec.options, "background", True)
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    stable = {"lr": 0.01, "momentum": 0.0}  # for as many steps as a compilation takes
    state, steps, seen = linear(**stable), 0, []
    deadline = time.monotonic() + 240
    while (seen or [None])[-1] != ("inductor", 2) and time.monotonic() < deadline:
        program(lambda k: k in (0, 2))(state, steps, partial(coexec.GradientTape, executor="inductor"))
        steps += 1
        [report] = coexec.explain().programs
        if report.blocks and (now := (report.blocks[0].executor, blocks(report))) not in seen:
            seen.append(now)
    torch.manual_seed(0)
    eager = linear(**stable)
    for k in range(steps):
        program(lambda k: k in (0, 2))(eager, k, eager_tape)

    assert [executor for executor, _ in seen] == ["aten", "inductor", "inductor"]
    assert seen[1][1] > seen[2][1] == 2
    assert report.fallbacks <= 1
    for mine, eagers in zip(state.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, eagers)


def test_ways_that_are_taken_now_and_then_remain():
    early = run(lambda k: k % 5 == 1, steps=AFTER)
    late = run(lambda k: k % 5 == 1)

    assert blocks(late) == blocks(early)
    assert late.fallbacks == early.fallbacks


def test_a_way_that_is_taken_after_all_costs_one_fallback_and_then_remains():
    early = run(lambda k: k in (0, 2), steps=AFTER)
    late = run(lambda k: k in (0, 2) or (k >= STEPS and k % 20 == 0), steps=4 * STEPS)

    assert late.fallbacks == early.fallbacks + 1
    assert blocks(late) == blocks(early)


def test_programs_with_many_ways_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(program_state, "MAX_WAYS", 1)
    early = run(lambda k: k in (0, 2) or k % 3 == 0, steps=AFTER)
    late = run(lambda k: k in (0, 2) or k % 3 == 0)

    assert blocks(late) == blocks(early)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
@pytest.mark.parametrize("others", [(), (0, 2)], ids=["one way", "two ways"])
def test_state_that_the_first_step_makes_stays_left_out(kind, others):
    def make():
        state = linear()
        state.optimizer = kind(state.model.parameters(), lr=0.01)
        return state

    report = run_closely(make, lambda k: k in others)

    assert coexecuted(report)
    assert {block.executor for block in report.blocks} == {"inductor"}
    assert blocks(report) == 2  # the iteration, and its commit


def test_a_smaller_graph_that_cannot_be_compiled_does_not_take_the_place_of_one_that_can(monkeypatch):
    make_program, made = program_state.make_program, []

    def without_compiler_for_one_way(graph, executor, **options):
        has_forks = any(len(targets) > 1 for targets in graph.edges.values())
        made.append(has_forks)
        if has_forks:
            return make_program(graph, executor, **options)
        return replace(make_program(graph, "aten"), why_aten="it has no forks")

    monkeypatch.setattr(program_state, "make_program", without_compiler_for_one_way)
    report = run(lambda k: k in (0, 2))

    assert not made[-1]
    assert {block.executor for block in report.blocks} == {"inductor"}
    assert blocks(report) == blocks(run(lambda k: k in (0, 2), steps=AFTER))


def test_graphs_that_no_compiler_takes_keep_all_ways():
    report = compare(linear, program(lambda k: k in (0, 2)), STEPS, executor="aten")
    again = compare(linear, program(lambda k: k in (0, 2) or k == STEPS), STEPS + 4, executor="aten")

    assert again.fallbacks == report.fallbacks


def test_the_smaller_graph_is_one_with_the_ways_that_were_taken():
    run(lambda k: k in (0, 2))
    [state] = all_states()

    assert state.graph is not None
    smaller = live(state.graph, state._ways)
    verify_graph(smaller)
    assert len(state._ways) == 1
    [way] = state._ways
    taken = {n.id for n in smaller.nodes if n.alternatives}
    assert taken == set(way.path)
    assert all(len(n.alternatives) <= 1 for n in smaller.nodes)
    assert sum(map(len, smaller.edges.values())) == len(way.path) + 1
    assert live(state.graph, state._ways) == live(smaller, state._ways)


def test_an_exception_of_the_program_does_not_bring_ways_back():
    def step(state, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = state.model(x)
            y = torch.tanh(h) if k in (0, 2) else h
            if k == STEPS - 4:
                raise ValueError("a mistake")
            train(state, (h + y).square().mean())

    report = compare(linear, step, STEPS, executor="inductor")

    assert coexecuted(report)
    assert blocks(report) == blocks(run(lambda k: False))


def test_a_graph_that_has_all_traces_it_may_have_goes_on_serving(monkeypatch):
    """What is new then falls back, and what is known is co-executed as before."""
    monkeypatch.setattr(coexec.options, "max_traces", 4)

    def step(s, k, tape):
        x = torch.randn(2, 4)
        with tape():
            y = s.model(x)
            for _ in range(k // 8 if k % 8 == 7 else 0):
                y = y + 1  # rarely, and as often as never before
            train(s, y.square().mean())

    report = compare(linear, step, 64)

    assert report.phase == "co-execution", report.summary()
    assert report.traces == 4
    assert report.steps["co-execution"] >= 48, report.summary()
