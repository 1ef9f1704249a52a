from __future__ import annotations

import pytest

from pipeline.actions import Message
from pipeline.errors import ProgramError
from pipeline.passes import add_communication
from pipeline.program import Program, chain
from pipeline.schedules import interleaved, one_f_one_b, zb_h1, zbv
from pipeline.torch_text import from_torch, to_torch, write_csv
from pipeline.validator import check
from tests.pipeline.programs import PROGRAMS

pytest.importorskip("torch.distributed.pipelining")

from pipeline.torch_schedule import check_with_torch

EXPRESSIBLE = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_torch_accepts_what_it_can_express(name):
    check_with_torch(PROGRAMS[name]())


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_torch_accepts_pipelines_of_many_shapes(p):
    for m in (2 * p, 3 * p):
        shapes = [one_f_one_b(chain(m, [1] * p)), zb_h1(p, m), zbv(p, m)]
        for program in (*shapes, *(interleaved(p, m, v) for v in (2, 3))):
            exported = add_communication(program)
            check_with_torch(exported)
            assert not check(from_torch(to_torch(exported)), matching="fifo")


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_torch_rejects_a_program_that_lacks_a_message(name):
    program = PROGRAMS[name]()
    first, *others = program.ranks
    at = next(i for i, action in enumerate(first) if isinstance(action, Message))
    with pytest.raises(ProgramError, match="torch rejects the program"):
        check_with_torch(Program(program.layout, (first[:at] + first[at + 1 :], *others)))


def test_torch_rejects_a_backward_pass_before_its_forward_pass():
    program = PROGRAMS["gpipe"]()
    *others, last = program.ranks
    with pytest.raises(ProgramError, match="without first running Forward"):
        check_with_torch(Program(program.layout, (*others, last[::-1])))


def test_a_program_as_torchs_csv_is_the_program(tmp_path):
    program = PROGRAMS["zbv"]()
    write_csv(program, tmp_path / "zbv.csv")
    rows = [line.split(",") for line in (tmp_path / "zbv.csv").read_text().splitlines()]
    assert rows == to_torch(program)
    assert to_torch(from_torch(rows)) == rows
