"""A program runs call by call only while that is faster than eager execution."""

from __future__ import annotations

import pytest
import torch

from coexec import pace
from coexec._native import core
from coexec.pace import FIRST_STAY, LAST_STAY, TIMED, TIMED_EAGER, Pace
from tests.coexec.harness import compare, linear, train


def run(measured, seconds, iterations):
    """The ways, eager or not, that iterations are run in which take `seconds(eager)`."""
    ways = []
    for _ in range(iterations):
        eager = measured.next_is_eager()
        measured.took(seconds(eager), eager=eager)
        ways.append(eager)
    return ways


def test_the_faster_way_is_kept_until_both_are_measured_again():
    measured = Pace()

    ways = run(measured, lambda eager: 1.0 if eager else 2.0, TIMED + TIMED_EAGER + FIRST_STAY + 1)

    assert ways[:TIMED] == [False] * TIMED
    assert ways[TIMED:-1] == [True] * (TIMED_EAGER + FIRST_STAY)
    assert ways[-1] is False, "the dynamic phase is measured again"


def test_a_dynamic_phase_that_is_faster_goes_on():
    measured = Pace()

    ways = run(measured, lambda eager: 2.0 if eager else 1.0, 5_000)

    assert sum(ways) <= 6 * TIMED_EAGER


def test_what_wins_again_is_kept_for_longer_up_to_a_limit():
    measured = Pace()
    stays = []
    for _ in range(12):
        run(measured, lambda eager: 1.0 if eager else 2.0, TIMED + TIMED_EAGER)
        stays.append(measured.stay)
        run(measured, lambda eager: 1.0 if eager else 2.0, measured.stay)

    assert stays[:3] == [FIRST_STAY, 2 * FIRST_STAY, 4 * FIRST_STAY]
    assert stays[-1] == LAST_STAY


def test_the_news_that_eager_is_faster_is_told_once():
    measured = Pace()
    told = 0
    for _ in range(5_000):
        eager = measured.next_is_eager()
        told += measured.took(1.0 if eager else 2.0, eager=eager)

    assert told == 1


@pytest.mark.skipif(core is None, reason="the native core is not built")
def test_a_program_goes_from_one_way_to_the_other_with_eagers_results(monkeypatch):
    monkeypatch.setattr(pace, "TIMED", 4)
    monkeypatch.setattr(pace, "TIMED_EAGER", 2)
    monkeypatch.setattr(pace, "FIRST_STAY", 3)

    def step(s, k, tape):
        x = torch.randn(2 + k % 7, 4)
        with tape():
            rows = s.model(x)[x[:, 0] > 0]
            train(s, rows.square().sum())
            s.log.append(len(rows))

    report = compare(linear, step, 40)

    assert report.phase == "dynamic"
    assert report.steps["eager"] >= 2
    assert report.steps["dynamic"] >= 8
