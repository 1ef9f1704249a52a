from __future__ import annotations

import numpy as np
import pytest

from pipeline.passes import add_communication
from pipeline.program import chain
from pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zbv
from tests.pipeline.runtime.pool import RankFailure

CASES = {
    "ScheduleGPipe": gpipe(chain(8, [1, 1, 1, 1])),
    "Schedule1F1B": one_f_one_b(chain(8, [1, 1, 1, 1])),
    "ScheduleInterleaved1F1B": interleaved(4, 8, 2),
    "ScheduleZBVZeroBubble": zbv(4, 8),
}


@pytest.mark.parametrize("schedule", CASES)
def test_gradients_have_the_bits_of_torchs_own_pipeline(schedule, four):
    text = str(add_communication(CASES[schedule]))
    ours = four.run("gradients", text)
    theirs = four.run("gradients_of_torch", text, schedule)
    for here, there in zip(ours, theirs, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def test_zb_h1_has_the_bits_of_torchs_1f1b(four):
    text = str(add_communication(zb_h1(4, 8)))
    ours = four.run("gradients", text)
    theirs = four.run("gradients_of_torch", text, "Schedule1F1B")
    for here, there in zip(ours, theirs, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zbv"])
def test_a_program_exported_to_torch_gives_the_same_bits(name, four):
    made = {"interleaved": interleaved(4, 8, 2), "zb-h1": zb_h1(4, 8), "zbv": zbv(4, 8)}
    text = str(add_communication(made[name]))
    ours = four.run("gradients", text)
    theirs = four.run("gradients_of_export", text)
    for here, there in zip(ours, theirs, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def test_stages_that_the_program_does_not_give_a_rank_are_refused(four):
    dealt_out, folded = (str(add_communication(program)) for program in (interleaved(4, 8, 2), zbv(4, 8)))
    with pytest.raises(RankFailure, match=r"rank 1 has stages \[1, 5\] of 8; the program gives it \[1, 6\]"):
        four.run("gradients_of_export", dealt_out, folded)
