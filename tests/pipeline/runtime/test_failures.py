from __future__ import annotations

import random
import re
import time

import pytest

from pipeline.actions import Kind, Message, Wait
from pipeline.passes import add_communication, bpipe
from pipeline.program import Program, chain
from pipeline.schedules import one_f_one_b
from tests.pipeline.runtime.pool import Pool, RankFailure

PROGRAM = add_communication(bpipe(one_f_one_b(chain(6, [1, 1, 1, 1]))))
LIMIT_S = 3.0


def failure(pool: Pool, case: str, *arguments) -> tuple[dict[int, str], float]:
    """What each rank said, and how long it took."""
    pool.start()
    start = time.monotonic()
    with pytest.raises(RankFailure) as info:
        pool.run(case, *arguments)
    return info.value.errors, time.monotonic() - start


def test_a_rank_that_fails_says_where_and_why(four):
    errors, _ = failure(four, "fail_at", str(PROGRAM), 2, 7, "raise")
    assert f"RunError: rank 2, index 7 ({PROGRAM.ranks[2][7]}): a stage that fails" in errors[2]


@pytest.mark.parametrize("how", ["die", "hang"])
def test_the_others_are_told_which_rank_and_action_they_waited_for(how, four):
    errors, took = failure(four, "fail_at", str(PROGRAM), 2, 12, how)
    neighbours = [text for r, text in errors.items() if "rank 2 " in text.splitlines()[0] and r != 2]
    expected = "rank 2 is gone" if how == "die" else "rank 2 did not answer within 3 s"
    assert any(expected in text and "WAIT" in text for text in neighbours)
    assert set(errors) >= {0, 1, 3}
    assert all("RunError: rank" in errors[r] for r in (0, 1, 3))
    assert took < 4 * LIMIT_S + 5


def test_a_message_that_is_never_sent_ends_in_an_error(four):
    send = next(a for a in PROGRAM.ranks[1] if isinstance(a, Message) and a.kind is Kind.SEND)
    ranks = [tuple(a for a in actions if r != 1 or a != send) for r, actions in enumerate(PROGRAM.ranks)]
    program = Program(PROGRAM.layout, tuple(ranks))
    errors, _ = failure(four, "disagree", [str(program)] * 4, False)
    waiting = next(
        f"rank 2, index {i} ({a})"
        for i, a in enumerate(program.ranks[2])
        if isinstance(a, Wait) and isinstance(a.on, Message) and a.on.start == send.start
    )
    assert any(f"{waiting}: rank 1 did not answer" in text for text in errors.values())


def test_a_program_that_would_go_wrong_is_not_started(four):
    ranks = (*PROGRAM.ranks[:3], PROGRAM.ranks[3][1:])
    errors, _ = failure(four, "disagree", [str(Program(PROGRAM.layout, ranks))] * 4, True)
    assert all("ValidationError: rank" in text for text in errors.values())


def test_ranks_with_different_programs_say_where_they_differ(four):
    other = add_communication(one_f_one_b(chain(6, [1, 1, 1, 1])))
    errors, _ = failure(four, "disagree", [str(PROGRAM)] * 3 + [str(other)], True)
    assert "rank 3 has another program than rank 0: line" in errors[3]
    assert "rank 0 has another program than ranks [3]" in errors[0]


def test_a_rank_is_told_when_its_stages_do_not_fit(four):
    wrong = add_communication(one_f_one_b(chain(6, [1, 1, 1])))
    errors, _ = failure(four, "disagree", [str(wrong)] * 4, True)
    assert "4 processes for a program of 3 ranks" in errors[0]


def test_a_change_in_place_is_an_error_and_never_a_wrong_gradient(four):
    plain = add_communication(one_f_one_b(chain(6, [1, 1, 1, 1])))
    errors, _ = failure(four, "change_in_place", str(plain))
    index = next(i for i, a in enumerate(plain.ranks[1]) if str(a).startswith("B "))
    first = errors[1].splitlines()[0]
    assert first.startswith(f"InPlaceError: rank 1, index {index} (B 1 0 w0): ")
    assert "ExpBackward0 at cases.py" in first


def test_a_rank_that_is_gone_before_the_start_is_reported(four):
    errors, _ = failure(four, "leave_early", str(PROGRAM))
    assert "exit code -9" in errors.pop(1)
    assert all("before the first action: some rank is gone" in text for text in errors.values())


@pytest.mark.slow
def test_killing_any_rank_at_any_action_ends_in_an_error_that_names_it(four):
    chosen = random.Random(0)
    told = 0
    for _ in range(50):
        victim = chosen.randrange(4)
        index = chosen.randrange(len(PROGRAM.ranks[victim]))
        started = time.monotonic()
        with pytest.raises(RankFailure) as info:
            four.run("fail_at", str(PROGRAM), victim, index, "die")
        errors = info.value.errors
        assert "exit code -9" in errors.pop(victim)
        assert time.monotonic() - started < 6 * LIMIT_S
        first_lines = [text.splitlines()[0] for text in errors.values()]
        assert all(re.match(r"RunError: rank \d, index \d+ \(.*\): ", line) for line in first_lines)
        # Who has all from the victim that it needs may end well; but not while something was still to come.
        rest = PROGRAM.ranks[victim][index:]
        if any(isinstance(action, Message) for action in rest):
            assert any(f"rank {victim} is gone" in line for line in first_lines)
            told += 1
    assert told > 40
