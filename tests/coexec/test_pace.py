"""Of the ways in which a program can run, the fastest one is kept."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import coexec
from coexec import pace, program_state
from coexec._native import core
from coexec.options import Options
from coexec.pace import FIRST_STAY, LAST_STAY, SLOW, TIMED, TIMED_OTHER, TIMED_SLOW, Choice, Pace
from coexec.runners.python_runner import PythonRunner
from tests.coexec.harness import Twice, coexecuted, compare, linear, train

took = Pace.took
USUAL, LATE, EAGER = Choice.USUAL, Choice.LATE, Choice.EAGER
ON_THE_GRAPH = (USUAL, LATE, EAGER)


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    monkeypatch.setattr(coexec.options, "eager_if_faster", True)


def run(measured, seconds, iterations):
    """The ways that iterations are run in, which take `seconds` each."""
    ways = []
    for _ in range(iterations):
        way = measured.next()
        measured.took(seconds[way], way)
        ways.append(way)
    return ways


def test_the_faster_way_is_kept_until_both_are_measured_again():
    ways = run(Pace(), {USUAL: 2.0, EAGER: 1.0}, TIMED + TIMED_OTHER + FIRST_STAY + 1)

    assert ways[:TIMED] == [USUAL] * TIMED
    assert ways[TIMED:-1] == [EAGER] * (TIMED_OTHER + FIRST_STAY)
    assert ways[-1] is USUAL, "the usual way is measured again"


@pytest.mark.parametrize("fastest", ON_THE_GRAPH)
def test_each_way_is_measured_and_the_fastest_kept(fastest):
    seconds = {way: 1.0 if way is fastest else 1.2 for way in ON_THE_GRAPH}

    ways = run(Pace(ON_THE_GRAPH), seconds, TIMED + 2 * TIMED_OTHER + FIRST_STAY + 1)

    assert ways[:TIMED] == [USUAL] * TIMED
    assert ways[TIMED:][: 2 * TIMED_OTHER] == [LATE] * TIMED_OTHER + [EAGER] * TIMED_OTHER
    assert ways[TIMED + 2 * TIMED_OTHER : -1] == [fastest] * FIRST_STAY


def test_a_way_that_is_much_slower_is_left_early():
    seconds = {USUAL: 1.0, LATE: 1.1 * SLOW, EAGER: 0.9 * SLOW}

    ways = run(Pace(ON_THE_GRAPH), seconds, TIMED + 2 * TIMED_OTHER)

    assert ways.count(LATE) == TIMED_SLOW
    assert ways.count(EAGER) == TIMED_OTHER


@pytest.mark.parametrize("fastest", ON_THE_GRAPH)
def test_when_all_are_measured_again_the_fastest_is_not_repeated_for_it(fastest):
    seconds = {way: 1.0 if way is fastest else 1.2 for way in ON_THE_GRAPH}
    measured = Pace(ON_THE_GRAPH)
    run(measured, seconds, TIMED + 2 * TIMED_OTHER)
    run(measured, seconds, stay := measured.stay)

    others = sum(TIMED if way is USUAL else TIMED_OTHER for way in ON_THE_GRAPH if way is not fastest)
    ways = run(measured, seconds, others)

    assert fastest not in ways
    assert measured.stay == 2 * stay


def test_of_ways_that_take_as_long_the_usual_one_is_kept():
    ways = run(Pace(ON_THE_GRAPH), dict.fromkeys(ON_THE_GRAPH, 1.0), 1_000)

    assert set(ways[TIMED + 2 * TIMED_OTHER :][:FIRST_STAY]) == {USUAL}


def test_a_usual_way_that_is_faster_goes_on():
    ways = run(Pace(), {USUAL: 1.0, EAGER: 2.0}, 5_000)

    assert ways.count(EAGER) <= 6 * TIMED_OTHER


def test_what_wins_again_is_kept_for_longer_up_to_a_limit():
    measured = Pace()
    stays = []
    for _ in range(12):
        while not measured.stay:
            run(measured, {USUAL: 2.0, EAGER: 1.0}, 1)
        stays.append(measured.stay)
        run(measured, {USUAL: 2.0, EAGER: 1.0}, measured.stay)

    assert stays[:3] == [FIRST_STAY, 2 * FIRST_STAY, 4 * FIRST_STAY]
    assert stays[-1] == LAST_STAY


def test_the_news_that_another_way_is_faster_is_told_once():
    measured = Pace()
    told = 0
    for k in range(5_000):
        way = measured.next()
        told += measured.took(1.0 if (way is EAGER) == (k < 2_500) else 2.0, way)

    assert told == 2, "when it becomes faster, and when it is not any more"


def pretend(monkeypatch, fastest):
    """What is measured is that this way is the fastest."""
    monkeypatch.setattr(
        Pace, "took", lambda self, seconds, way: took(self, 1.0 if way is fastest else 1.2, way)
    )


@pytest.mark.parametrize("crowded", [True, False])
def test_where_processors_are_few_the_graph_runner_starts_late_if_that_is_faster(crowded, monkeypatch):
    monkeypatch.setattr(program_state, "processors", lambda: torch.get_num_threads() + (not crowded))
    late = []
    original = PythonRunner.__init__

    def make(self, *args, lazy, **kwargs):
        late.append(lazy)
        original(self, *args, lazy=lazy, **kwargs)

    monkeypatch.setattr(PythonRunner, "__init__", make)
    pretend(monkeypatch, LATE)

    report = compare(linear, on_the_graph, TIMED + 2 * TIMED_OTHER + 20)

    coexecuted(report, TIMED + TIMED_OTHER + 10)
    assert late[:TIMED] == [False] * TIMED
    assert set(late[TIMED:]) == {crowded}


def call_by_call(s, k, tape):
    x = torch.randn(2 + k % 7, 4)
    with tape():
        rows = Twice.apply(s.model(x))[x[:, 0] > 0]
        train(s, rows.square().sum())
        s.log.append(len(rows))


def on_the_graph(s, k, tape):
    x = torch.randn(5, 4)
    with tape():
        train(s, s.model(x).pow(2).mean())


@pytest.mark.parametrize("fastest", [USUAL, EAGER])
def test_asynchronous_iterations_run_eagerly_too_if_that_is_faster(fastest, monkeypatch):
    monkeypatch.setattr(program_state, "processors", torch.get_num_threads)
    pretend(monkeypatch, fastest)

    report = compare(linear, on_the_graph, TIMED + TIMED_OTHER + 20, synchronous=False)

    eager = TIMED_OTHER + (10 if fastest is EAGER else 0)
    assert eager <= report.steps.get("eager", 0) <= eager + 10
    assert report.steps.get("fallback", 0) == 0
    assert any(cause.id == "CX0120" for cause in report.causes) == (fastest is EAGER)


def test_asynchronous_iterations_are_timed_with_what_python_does_behind_them(monkeypatch):
    now = 0.0
    monkeypatch.setattr(program_state, "time", SimpleNamespace(perf_counter=lambda: now))
    state = program_state.ProgramState("p", Options(executor="aten", synchronous=False), (run.__code__, 0))
    state._measure_ways(SimpleNamespace(threads=1))

    ways = []
    for _ in range(TIMED + TIMED_OTHER + 20):
        ways.append(state.entered())
        now += 1.0 if ways[-1] is EAGER else 1.2

    assert ways == [USUAL] * TIMED + [EAGER] * (TIMED_OTHER + 20)


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_another_trace_does_not_make_a_program_forget_which_way_is_the_fastest(monkeypatch):
    monkeypatch.setattr(program_state, "processors", torch.get_num_threads)
    pretend(monkeypatch, EAGER)
    monkeypatch.setattr(pace, "FIRST_STAY", 10)
    turns = []
    next_ = Pace.next
    monkeypatch.setattr(Pace, "next", lambda self: turns.append(next_(self)) or turns[-1])
    begins = TIMED + 2 * TIMED_OTHER + 10 + 3  # in the first iterations that are measured again

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            train(s, (y.relu() if k == begins + 4 else y).pow(2).mean())

    report = compare(linear, step, begins + TIMED + TIMED_OTHER + 20)

    assert report.steps["fallback"] == 1
    assert turns[-10:] == [EAGER] * 10
    assert turns.count(LATE) == 2 * TIMED_OTHER


@pytest.mark.parametrize("step", ["on_the_graph", "call_by_call"])
def test_nothing_runs_eagerly_without_leave(step, monkeypatch):
    monkeypatch.setattr(coexec.options, "eager_if_faster", False)
    monkeypatch.setattr(program_state, "processors", torch.get_num_threads)
    monkeypatch.setattr("coexec.program_state.MAX_IN_ROW", 0)
    pretend(monkeypatch, EAGER)

    report = compare(linear, globals()[step], TIMED + 2 * TIMED_OTHER + 20)

    assert report.steps.get("eager", 0) == 0
    assert not any(cause.id == "CX0120" for cause in report.causes)


@pytest.mark.parametrize("crowded", [True, False])
def test_a_program_with_a_graph_runs_eagerly_if_that_is_faster(crowded, monkeypatch):
    monkeypatch.setattr(program_state, "processors", lambda: torch.get_num_threads() + (not crowded))
    pretend(monkeypatch, EAGER)

    report = compare(linear, on_the_graph, TIMED + 2 * TIMED_OTHER + 20)

    assert report.steps["eager"] >= TIMED_OTHER + 10
    assert report.steps.get("fallback", 0) == 0
    assert report.phase == "co-execution"
    assert any(cause.id == "CX0120" for cause in report.causes)


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_a_program_comes_back_to_its_graph_when_that_is_faster_again(monkeypatch):
    monkeypatch.setattr(program_state, "processors", torch.get_num_threads)
    for name, value in {"TIMED": 4, "TIMED_OTHER": 2, "FIRST_STAY": 8, "LAST_STAY": 8}.items():
        monkeypatch.setattr(pace, name, value)
    turns = []

    def measure(self, seconds, way):
        turns.append(way)
        fastest = EAGER if len(turns) % 80 < 40 else USUAL
        return took(self, 1.0 if way is fastest else 2.0, way)

    monkeypatch.setattr(Pace, "took", measure)

    report = compare(linear, on_the_graph, 160)

    assert report.steps.get("fallback", 0) == 0
    stays = [way for way, same in itertools.groupby(turns) if len(list(same)) > 4]
    assert [way for way, _ in itertools.groupby(stays)][:3] == [EAGER, USUAL, EAGER]


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_a_program_goes_from_one_way_to_the_other_with_eagers_results(monkeypatch):
    monkeypatch.setattr("coexec.program_state.MAX_IN_ROW", 0)  # each fallback counts
    monkeypatch.setattr(pace, "TIMED", 4)
    monkeypatch.setattr(pace, "TIMED_OTHER", 2)
    monkeypatch.setattr(pace, "FIRST_STAY", 3)

    report = compare(linear, call_by_call, 40)

    assert report.phase == "dynamic"
    assert report.steps["eager"] >= 2
    assert report.steps["dynamic"] >= 8
