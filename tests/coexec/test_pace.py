"""Of the ways in which a program can run, the fastest one is kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from coexec import pace, program_state
from coexec._native import core
from coexec.pace import FIRST_STAY, LAST_STAY, TIMED, TIMED_OTHER, Choice, Pace
from coexec.runners.python_runner import PythonRunner
from tests.coexec.harness import Twice, coexecuted, compare, linear, train

took = Pace.took
USUAL, LATE, EAGER = Choice.USUAL, Choice.LATE, Choice.EAGER
ON_THE_GRAPH = (USUAL, LATE, EAGER)


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
    seconds = {way: 1.0 if way is fastest else 2.0 for way in ON_THE_GRAPH}

    ways = run(Pace(ON_THE_GRAPH), seconds, TIMED + 2 * TIMED_OTHER + FIRST_STAY + 1)

    assert ways[:TIMED] == [USUAL] * TIMED
    assert ways[TIMED:][: 2 * TIMED_OTHER] == [LATE] * TIMED_OTHER + [EAGER] * TIMED_OTHER
    assert ways[TIMED + 2 * TIMED_OTHER : -1] == [fastest] * FIRST_STAY


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
        run(measured, {USUAL: 2.0, EAGER: 1.0}, TIMED + TIMED_OTHER)
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
        Pace, "took", lambda self, seconds, way: took(self, 1.0 if way is fastest else 2.0, way)
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


def on_the_graph(s, k, tape):
    x = torch.randn(5, 4)
    with tape():
        train(s, s.model(x).pow(2).mean())


@pytest.mark.parametrize("crowded", [True, False])
def test_where_processors_are_few_a_program_with_a_graph_runs_eagerly_if_that_is_faster(crowded, monkeypatch):
    monkeypatch.setattr(program_state, "processors", lambda: torch.get_num_threads() + (not crowded))
    pretend(monkeypatch, EAGER)

    report = compare(linear, on_the_graph, TIMED + 2 * TIMED_OTHER + 20)

    assert (report.steps.get("eager", 0) >= TIMED_OTHER + 10) == crowded
    assert report.steps.get("fallback", 0) == 0
    assert report.phase == "co-execution"
    assert any(cause.id == "CX0120" for cause in report.causes) == crowded


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_a_program_comes_back_to_its_graph_when_that_is_faster_again(monkeypatch):
    monkeypatch.setattr(program_state, "processors", torch.get_num_threads)
    for name, value in {"TIMED": 4, "TIMED_OTHER": 2, "FIRST_STAY": 3, "LAST_STAY": 3}.items():
        monkeypatch.setattr(pace, name, value)
    turns = []

    def measure(self, seconds, way):
        turns.append(way)
        return took(self, 1.0 if (way is EAGER) == (len(turns) % 30 < 15) else 2.0, way)

    monkeypatch.setattr(Pace, "took", measure)

    report = compare(linear, on_the_graph, 90)

    assert report.steps.get("fallback", 0) == 0
    stays = [way for way, same in itertools.groupby(turns) if len(list(same)) > 4]
    assert stays[:3] == [EAGER, USUAL, EAGER]


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_a_program_goes_from_one_way_to_the_other_with_eagers_results(monkeypatch):
    monkeypatch.setattr("coexec.program_state.MAX_IN_ROW", 0)  # each fallback counts
    monkeypatch.setattr(pace, "TIMED", 4)
    monkeypatch.setattr(pace, "TIMED_OTHER", 2)
    monkeypatch.setattr(pace, "FIRST_STAY", 3)

    def step(s, k, tape):
        x = torch.randn(2 + k % 7, 4)
        with tape():
            rows = Twice.apply(s.model(x))[x[:, 0] > 0]
            train(s, rows.square().sum())
            s.log.append(len(rows))

    report = compare(linear, step, 40)

    assert report.phase == "dynamic"
    assert report.steps["eager"] >= 2
    assert report.steps["dynamic"] >= 8
