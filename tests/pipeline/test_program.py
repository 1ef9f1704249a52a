from __future__ import annotations

import pytest

from pipeline.errors import ProgramError
from pipeline.program import Layout, StageLayout, chain, parse_program
from tests.pipeline.programs import COMPUTATION, PROGRAMS

SMALL = """\
samples 2
stage 0 size 1 update 2 ranks 0
stage 1 size 2 update 2 ranks 1
edge 0 1
rank 0
  F 0 0 w0
rank 1
  F 1 0 w0
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_survives_its_text(name):
    for program in (PROGRAMS[name](), COMPUTATION[name]()):
        assert parse_program(str(program)) == program
        assert str(parse_program(str(program))) == str(program)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("samples 2", "sample 2", "line 1"),
        ("stage 1", "stage 3", "line 3: 'stage 3"),
        ("edge 0 1", "edge 0 1\nstage 2 size 1 update 2 ranks 2", "line 5"),
        ("edge 0 1", "edge 0 5", "a stage that does not exist"),
        ("edge 0 1", "edge 0 1\nedge 1 0", "cycle: 0 -> 1 -> 0"),
        ("rank 1", "rank 2", "line 7: 'rank 2'"),
        ("  F 1 0 w0", "F 1 0 w0", "line 8"),
        ("  F 1 0 w0", "  F 1 0", "line 8: 'F 1 0' is no action"),
        ("rank 1\n  F 1 0 w0\n", "", "actions for 1 ranks; the layout has 2"),
        ("size 2", "size 3", "micro-batches of 3 do not divide 2 samples"),
        ("size 2 update 2", "size 2 update 1", "an update takes in 1 samples"),
        ("ranks 1", "ranks 0 0", "must be different"),
        ("ranks 1", "ranks 2", "without gaps"),
    ],
)
def test_malformed_text_is_an_error_that_says_where(old, new, message):
    assert old in SMALL
    with pytest.raises(ProgramError, match=message):
        parse_program(SMALL.replace(old, new))


def test_stages_may_have_micro_batches_of_different_sizes():
    layout = chain(6, [1, 1, 1], sizes=[4, 2, 6])
    assert [layout.micro_batches(s) for s in range(3)] == [6, 12, 4]
    assert list(layout.overlapping(0, 1, 2)) == [0, 1]  # samples 4 to 7 lie in [0,6) and [6,12)
    assert list(layout.overlapping(2, 1, 0)) == [1, 2]
    assert list(layout.overlapping(2, 1, 1)) == [3, 4, 5]


def test_replicas_take_micro_batches_in_turn():
    layout = chain(7, [3])
    assert [layout.owner(0, k) for k in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert list(layout.owned(0, 1)) == [1, 4]


def test_a_layout_without_stages_or_samples_is_refused():
    with pytest.raises(ProgramError, match="at least one stage"):
        Layout((), (), 1)
    with pytest.raises(ProgramError, match="at least 1 is needed"):
        Layout((StageLayout(1, (0,), 1),), (), 0)
