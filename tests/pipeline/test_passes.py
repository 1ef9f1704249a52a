from __future__ import annotations

import random
from math import lcm

import pytest

from pipeline.actions import Compute, Kind, Message
from pipeline.passes import add_communication, recompute
from pipeline.program import Layout, StageLayout, chain, parse_program
from pipeline.schedules import gpipe, one_f_one_b
from pipeline.timeline import timeline, unit_durations
from pipeline.validator import check
from tests.pipeline.programs import COMPUTATION, PROGRAMS

FIRST_RANK = """\
samples 2
stage 0 size 1 update 2 ranks 0
stage 1 size 1 update 2 ranks 1
edge 0 1
rank 0
  F 0 0 w0
  SEND act 0>1 [0,1) @1
  RECV grad 1>0 [0,1) @1
  F 0 1 w0
  SEND act 0>1 [1,2) @1
  RECV grad 1>0 [1,2) @1
  WAIT RECV grad 1>0 [0,1) @1
  B 0 0 w0
  WAIT RECV grad 1>0 [1,2) @1
  B 0 1 w0
  UPDATE 0 w1
"""


def test_a_receive_starts_one_computation_before_the_one_that_waits_for_it():
    program = add_communication(one_f_one_b(chain(2, [1, 1])))
    assert str(program).split("rank 1")[0] == FIRST_RANK


def test_stages_on_one_rank_need_no_messages():
    layout = Layout((StageLayout(1, (0,), 2), StageLayout(1, (1,), 2)), ((0, 1),), 2)
    assert any(isinstance(a, Message) for r in add_communication(gpipe(layout)).ranks for a in r)
    program = PROGRAMS["zbv"]()  # the middle of the V is on the last rank
    assert not any(
        isinstance(a, Message) and {a.source, a.target} == {2, 3} for r in program.ranks for a in r
    )


def test_messages_carry_the_samples_that_two_micro_batches_share():
    program = add_communication(gpipe(chain(6, [1, 1], sizes=[2, 3])))
    sent = [str(a) for a in program.ranks[0] if isinstance(a, Message) and a.kind is Kind.SEND]
    assert sent[:4] == [
        "SEND act 0>1 [0,2) @1",
        "SEND act 0>1 [2,3) @1",
        "SEND act 0>1 [3,4) @1",
        "SEND act 0>1 [4,6) @1",
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_all_schedules_are_valid_by_tags_and_in_order(name):
    program = PROGRAMS[name]()
    assert check(program, matching="tags") == check(program, matching="fifo") == []


def random_layout(rng: random.Random) -> Layout:
    """Stages with sizes, replicas and edges at random."""
    count = rng.randint(2, 6)
    sizes = [rng.choice([1, 2, 3, 4, 6]) for _ in range(count)]
    edges = [(s, t) for t in range(1, count) for s in sorted(rng.sample(range(t), rng.randint(1, min(t, 2))))]
    samples = lcm(*sizes) * rng.randint(1, 4)
    stages, first = [], 0
    for size in sizes:
        replicas = rng.choice([1, 1, 2, 3])
        stages.append(StageLayout(size, tuple(range(first, first + replicas)), samples))
        first += replicas
    return Layout(tuple(stages), tuple(edges), samples)


def test_any_graph_of_stages_of_any_sizes_and_replicas_gives_a_valid_program():
    rng = random.Random(0)
    for _ in range(300):
        layout = random_layout(rng)
        for schedule in (gpipe, one_f_one_b):
            assert timeline(schedule(layout), unit_durations())
            assert not check(add_communication(schedule(layout)))


def test_recomputation_runs_forward_again_before_each_backward_of_its_stages():
    program = recompute(one_f_one_b(chain(2, [1, 1])), {0})
    assert [str(a) for a in program.ranks[0]] == [
        "F 0 0 w0",
        "F 0 1 w0",
        "RC 0 0 w0",
        "B 0 0 w0",
        "RC 0 1 w0",
        "B 0 1 w0",
        "UPDATE 0 w1",
    ]
    assert not any(isinstance(a, Compute) and a.kind is Kind.RECOMPUTE for a in program.ranks[1])


@pytest.mark.parametrize("name", ["pipedream", "zb-h1"])
def test_recomputation_uses_the_weights_of_the_forward_pass(name):
    program = add_communication(recompute(COMPUTATION[name](), {0, 1, 2}))
    assert not check(program)
    assert parse_program(str(program)) == program
