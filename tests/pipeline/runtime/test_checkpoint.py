from __future__ import annotations

import pytest

from pipeline.passes import add_communication, bpipe
from pipeline.program import chain
from pipeline.runtime import checkpoint
from pipeline.schedules import interleaved, one_f_one_b, pipedream
from tests.pipeline.runtime.pool import RankFailure
from tests.pipeline.runtime.test_numerics import merged

PROGRAMS = {
    "bpipe": bpipe(one_f_one_b(chain(4, [1, 1, 1, 1]))),
    "interleaved": interleaved(4, 4, 2),
    "pipedream": pipedream(chain(8, [1, 1, 1, 1])),
    "replicas": one_f_one_b(chain(4, [2, 2])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_resumed_run_equals_an_undisturbed_one(name, four, tmp_path):
    text = str(add_communication(PROGRAMS[name]))
    whole = merged(four.run("resumed", text, str(tmp_path / "whole"), 4), 4)
    first = merged(four.run("resumed", text, str(tmp_path / "parts"), 2), 2)
    rest = merged(four.run("resumed", text, str(tmp_path / "parts"), 4), 2)
    assert whole == first + rest


def test_a_set_that_lacks_a_file_is_passed_over(four, tmp_path):
    text = str(add_communication(PROGRAMS["bpipe"]))
    whole = merged(four.run("resumed", text, str(tmp_path), 3), 3)
    layout = PROGRAMS["bpipe"].layout
    newest = checkpoint.latest(layout, tmp_path)
    assert newest is not None
    assert newest.name == "run-00000003"
    (newest / "stage-1-rank-1.pt").unlink()
    assert merged(four.run("resumed", text, str(tmp_path), 3), 1) == whole[2:]


def test_a_checkpoint_of_another_run_is_refused(four, tmp_path):
    text = str(add_communication(PROGRAMS["bpipe"]))
    four.run("resumed", text, str(tmp_path), 1)
    other = str(add_communication(one_f_one_b(chain(4, [1, 1, 1, 1]))))
    with pytest.raises(RankFailure, match="written with another program"):
        four.run("resumed", other, str(tmp_path), 2)
    with pytest.raises(RankFailure, match="written with another seed"):
        four.run("resume_with_seed", text, str(tmp_path), 1)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    assert checkpoint.latest(PROGRAMS["bpipe"].layout, tmp_path) is None
