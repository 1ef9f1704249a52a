"""Of two ways in which a program can run, the faster one is kept."""

from __future__ import annotations

import pytest
import torch

from coexec import pace, program_state
from coexec._native import core
from coexec.pace import FIRST_STAY, LAST_STAY, TIMED, TIMED_OTHER, Pace
from coexec.runners.python_runner import PythonRunner
from tests.coexec.harness import Twice, coexecuted, compare, linear, train

took = Pace.took


def run(measured, seconds, iterations):
    """The ways, the other one or not, that iterations are run in which take `seconds(other)`."""
    ways = []
    for _ in range(iterations):
        other = measured.next_is_other()
        measured.took(seconds(other), other=other)
        ways.append(other)
    return ways


def test_the_faster_way_is_kept_until_both_are_measured_again():
    measured = Pace()

    ways = run(measured, lambda other: 1.0 if other else 2.0, TIMED + TIMED_OTHER + FIRST_STAY + 1)

    assert ways[:TIMED] == [False] * TIMED
    assert ways[TIMED:-1] == [True] * (TIMED_OTHER + FIRST_STAY)
    assert ways[-1] is False, "the usual way is measured again"


def test_a_usual_way_that_is_faster_goes_on():
    measured = Pace()

    ways = run(measured, lambda other: 2.0 if other else 1.0, 5_000)

    assert sum(ways) <= 6 * TIMED_OTHER


def test_what_wins_again_is_kept_for_longer_up_to_a_limit():
    measured = Pace()
    stays = []
    for _ in range(12):
        run(measured, lambda other: 1.0 if other else 2.0, TIMED + TIMED_OTHER)
        stays.append(measured.stay)
        run(measured, lambda other: 1.0 if other else 2.0, measured.stay)

    assert stays[:3] == [FIRST_STAY, 2 * FIRST_STAY, 4 * FIRST_STAY]
    assert stays[-1] == LAST_STAY


def test_the_news_that_the_other_way_is_faster_is_told_once():
    measured = Pace()
    told = 0
    for _ in range(5_000):
        other = measured.next_is_other()
        told += measured.took(1.0 if other else 2.0, other=other)

    assert told == 1


@pytest.mark.parametrize("crowded", [True, False])
def test_where_processors_are_few_the_graph_runner_starts_late_if_that_is_faster(crowded, monkeypatch):
    monkeypatch.setattr(program_state, "processors", lambda: torch.get_num_threads() + (not crowded))
    late = []
    original = PythonRunner.__init__

    def make(self, *args, lazy, **kwargs):
        late.append(lazy)
        original(self, *args, lazy=lazy, **kwargs)

    monkeypatch.setattr(PythonRunner, "__init__", make)
    monkeypatch.setattr(
        Pace, "took", lambda self, seconds, other: took(self, 1.0 if other else 2.0, other=other)
    )

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    report = compare(linear, step, TIMED + TIMED_OTHER + 20)

    coexecuted(report, TIMED + TIMED_OTHER + 10)
    assert late[:TIMED] == [False] * TIMED
    assert set(late[TIMED:]) == {crowded}


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
