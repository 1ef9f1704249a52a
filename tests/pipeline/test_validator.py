"""Each rule, by a program that breaks it and the words that say so."""

from __future__ import annotations

import pytest

from pipeline.actions import parse_action
from pipeline.errors import ValidationError
from pipeline.memory import MICRO_BATCHES, memory_traces, peaks
from pipeline.passes import add_communication
from pipeline.plans import StageCost
from pipeline.program import Program, chain, parse_program, with_ranks
from pipeline.schedules import gpipe, one_f_one_b
from pipeline.validator import check, validate
from tests.pipeline.programs import COMPUTATION, PROGRAMS


def edited(program: Program, rank: int, old: str, *new: str) -> Program:
    """The program with one line of a rank replaced."""
    lines = [str(a) for a in program.ranks[rank]]
    i = lines.index(old)
    lines[i : i + 1] = new
    ranks = list(program.ranks)
    ranks[rank] = tuple(map(parse_action, lines))
    return with_ranks(program, ranks)


def reasons(program: Program, **options) -> str:
    return "\n".join(map(str, check(program, **options)))


@pytest.mark.parametrize(
    ("name", "rank", "old", "new", "message"),
    [
        # Work.
        ("gpipe", 1, "F 1 2 w0", [], "(end): the forward pass F 1 2 is missing"),
        ("gpipe", 1, "B 1 2 w0", [], "it is 0 B, 0 BI and 0 BW"),
        ("zb-h1", 1, "BW 1 2 w0", [], "it is 0 B, 1 BI and 0 BW"),
        ("gpipe", 1, "F 1 2 w0", ["F 1 2 w0", "F 1 2 w0"], "(F 1 2 w0): is here a second time"),
        ("gpipe", 1, "F 1 2 w0", ["F 1 9 w0"], "stage 1 has 4 micro-batches"),
        ("gpipe", 1, "F 1 2 w0", ["F 9 2 w0"], "there is no stage 9"),
        ("gpipe", 1, "F 1 2 w0", ["F 2 2 w0"], "this micro-batch belongs to rank 2"),
        ("1f1b, two replicas", 1, "F 0 1 w0", ["F 0 2 w0"], "this micro-batch belongs to rank 0"),
        ("gpipe", 1, "UPDATE 1 w1", [], "(end): UPDATE 1 w1 is missing"),
        ("gpipe", 1, "UPDATE 1 w1", ["UPDATE 0 w1"], "stage 0 is not on this rank"),
        ("gpipe", 1, "UPDATE 1 w1", ["UPDATE 1 w2"], "stage 1 makes 1 updates"),
        # Order.
        ("gpipe", 1, "WAIT RECV act 0>1 [2,3) @0", [], "there is no WAIT RECV act 0>1 [2,3) @0 before it"),
        ("gpipe", 1, "RECV act 0>1 [2,3) @0", [], "waits for something that has not been started"),
        ("gpipe", 0, "F 0 1 w0", ["SEND act 0>1 [1,2) @1", "F 0 1 w0"], "is here a second time"),
        ("zb-h1", 1, "BI 1 2 w0", ["BW 1 2 w0", "BI 1 2 w0"], "second time"),
        ("bpipe", 0, "WAIT LOAD 0 1 @3", [], "needs what F 0 1 saved, which is in transit (LOAD 0 1 @3)"),
        ("bpipe", 0, "WAIT EVICT 0 1 @3", [], "saved is in transit (EVICT 0 1 @3), not on rank 3"),
        ("bpipe", 3, "WAIT ACCEPT 0 1 @0", [], "saved is in transit (ACCEPT 0 1 @0), not held for rank 0"),
        ("bpipe", 3, "WAIT RETURN 0 1 @0", [], "(end): RETURN 0 1 @0 is never waited for"),
        # Weights.
        ("pipedream", 0, "B 0 3 w1", ["B 0 3 w2"], "uses version 2 where its forward pass used version 1"),
        ("pipedream", 0, "STASH 0 w1", [], "version 1 is not there; the current one is 3"),
        ("pipedream", 0, "STASH 0 w1", ["STASH 0 w6"], "only the current version can be stashed, which is 1"),
        ("2bw", 0, "B 0 2 w0", ["UPDATE 0 w1", "B 0 2 w0"], "second time"),
        ("1f1b, two replicas", 0, "REDUCE 0 w1", [], "the gradients of the 2 replicas have not been reduced"),
        # Messages.
        ("gpipe", 1, "RECV act 0>1 [2,3) @0", ["RECV act 0>1 [1,2) @0"], "second time"),
        ("gpipe", 0, "SEND act 0>1 [2,3) @1", ["SEND act 0>1 [2,3) @2"], "between rank 0 and rank 1"),
        ("gpipe", 0, "SEND act 0>1 [2,3) @1", ["SEND act 0>2 [2,3) @2"], "no edge from stage 0 to stage 2"),
        (
            "gpipe",
            0,
            "SEND act 0>1 [2,3) @1",
            ["SEND act 0>1 [2,4) @1"],
            "two micro-batches share, here [2,3)",
        ),
        ("gpipe", 0, "SEND act 0>1 [2,3) @1", ["SEND act 0>1 [7,8) @1"], "there are no such samples"),
        ("bpipe", 3, "ACCEPT 0 1 @0", ["ACCEPT 0 1 @3"], "rank 3 is no other rank"),
        ("bpipe", 3, "ACCEPT 0 1 @0", ["ACCEPT 0 1 @2"], "this micro-batch belongs to rank 0"),
    ],
)
def test_a_broken_program_is_rejected_in_words_that_say_what_is_wrong(name, rank, old, new, message):
    program = edited(PROGRAMS[name](), rank, old, *new)
    assert message in reasons(program)
    assert f"rank {rank}, index " in reasons(program)


def test_a_message_that_is_never_sent_is_found_at_the_other_end():
    program = edited(PROGRAMS["gpipe"](), 0, "SEND act 0>1 [2,3) @1")
    (found,) = check(program)
    assert (found.rank, found.action) == (1, "RECV act 0>1 [2,3) @0")
    assert found.reason == "rank 0 never starts SEND act 0>1 [2,3) @1"


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["UPDATE 0 w2", "UPDATE 0 w1"], "index 2 (UPDATE 0 w2): the next version is 1"),
        (
            ["UPDATE 0 w1", "UPDATE 0 w2"],
            "index 3 (UPDATE 0 w2): takes in 0 gradients of this rank; 1 belong",
        ),
    ],
)
def test_updates_come_in_order_and_take_in_what_belongs_to_them(actions, message):
    header = "samples 2\nstage 0 size 1 update 1 ranks 0\nrank 0\n"
    lines = ["F 0 0 w0", "B 0 0 w0", *actions, "F 0 1 w1", "B 0 1 w1"]
    assert message in reasons(parse_program(header + "".join(f"  {line}\n" for line in lines)))


def test_a_gradient_that_comes_after_its_update_is_rejected():
    program = edited(PROGRAMS["pipedream"](), 0, "UPDATE 0 w3")
    moved = edited(program, 0, "B 0 3 w1", "B 0 3 w1", "UPDATE 0 w3")
    assert "its gradient belongs to UPDATE w4, and the next one is w3" in reasons(moved)


def test_without_recomputation_a_micro_batch_is_kept_and_that_is_only_a_matter_of_memory():
    cost = [StageCost(saved_bytes=10.0, input_bytes=1.0)] * 3
    program = PROGRAMS["1f1b, recomputed"]()
    kept = edited(program, 0, "RC 0 2 w0")
    assert not check(kept)
    assert peaks(program, cost)[0] == 12 < peaks(kept, cost)[0]


def test_a_problem_names_rank_index_and_action():
    program = edited(PROGRAMS["gpipe"](), 1, "WAIT RECV act 0>1 [0,1) @0")
    (found,) = (p for p in check(program) if "no WAIT" in p.reason)
    assert (found.rank, found.index, found.action) == (1, 2, "F 1 0 w0")
    assert str(found).startswith("rank 1, index 2 (F 1 0 w0): needs the output of stage 0 for samples [0,1)")
    with pytest.raises(ValidationError, match="rank 1, index 2"):
        validate(program)


def test_messages_out_of_order_are_right_by_tag_and_wrong_in_order():
    program = PROGRAMS["gpipe"]()
    lines = [str(a) for a in program.ranks[0]]
    first, second = lines.index("SEND act 0>1 [1,2) @1"), lines.index("SEND act 0>1 [2,3) @1")
    assert first < second
    moved = [line for line in lines if line != "SEND act 0>1 [1,2) @1"]
    moved.insert(moved.index("SEND act 0>1 [2,3) @1") + 1, "SEND act 0>1 [1,2) @1")
    swapped = with_ranks(program, [map(parse_action, moved), *program.ranks[1:]])
    assert not check(swapped, matching="tags")
    assert "rank 0 gives RECV act 0>1 [2,3) @0 first, and ends match in order" in reasons(swapped)


DEADLOCK = """\
samples 1
stage 0 size 1 update 1 ranks 0
stage 1 size 1 update 1 ranks 1
edge 0 1
rank 0
  F 0 0 w0
  RECV grad 1>0 [0,1) @1
  WAIT RECV grad 1>0 [0,1) @1
  SEND act 0>1 [0,1) @1
  B 0 0 w0
  UPDATE 0 w1
rank 1
  RECV act 0>1 [0,1) @0
  WAIT RECV act 0>1 [0,1) @0
  F 1 0 w0
  B 1 0 w0
  SEND grad 1>0 [0,1) @0
  UPDATE 1 w1
"""


def test_a_deadlock_is_printed_as_its_circle():
    (found,) = check(parse_program(DEADLOCK))
    circle = [
        "rank 0, index 2 (WAIT RECV grad 1>0 [0,1) @1)",
        "rank 1, index 1 (WAIT RECV act 0>1 [0,1) @0)",
    ]
    ring = [" -> ".join([*circle, circle[0]]), " -> ".join([*circle[::-1], circle[1]])]
    assert found.reason in [f"deadlock, each waits for the next: {steps}" for steps in ring]


def test_replicas_that_reduce_in_another_order_deadlock():
    program = PROGRAMS["interleaved, two replicas"]()
    lines = [str(a) for a in program.ranks[0]]
    tail = ["REDUCE 2 w1", "UPDATE 2 w1", "REDUCE 0 w1", "UPDATE 0 w1"]
    assert sorted(lines[-4:]) == sorted(tail)
    swapped = with_ranks(program, [map(parse_action, [*lines[:-4], *tail]), *program.ranks[1:]])
    assert "REDUCE 2 w1" in reasons(swapped)
    assert "REDUCE 0 w1" in reasons(swapped)
    assert "deadlock" in reasons(swapped)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_memory_bound_holds_exactly_at_the_peak(name):
    program = PROGRAMS[name]()
    costs = [StageCost(output_bytes=3.0, parameter_bytes=5.0, saved_bytes=7.0, input_bytes=2.0)]
    costs *= len(program.layout.stages)
    peak = max(peaks(program, costs))
    assert not check(program, costs=costs, memory_bytes=peak)
    assert f"the rank holds {peak:.0f} bytes here; it may hold {peak - 1:.0f}" in reasons(
        program, costs=costs, memory_bytes=peak - 1
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_taken_is_given_back(name):
    program = PROGRAMS[name]()
    costs = [StageCost(output_bytes=3.0, parameter_bytes=5.0, saved_bytes=7.0, input_bytes=2.0)]
    costs *= len(program.layout.stages)
    for r, trace in enumerate(memory_traces(program, costs)):
        weights = 5.0 * len(program.layout.hosted(r))
        assert trace[-1] == pytest.approx(weights)
        assert min(trace) >= weights


def test_computation_alone_lacks_its_messages():
    assert "there is no WAIT RECV act 0>1 [0,1) @0 before it" in reasons(COMPUTATION["gpipe"]())


def test_a_backward_pass_before_its_forward_pass_is_rejected():
    program = add_communication(one_f_one_b(chain(4, [1, 1])))
    early = edited(program, 1, "B 1 2 w0")
    early = edited(early, 1, "F 1 2 w0", "B 1 2 w0", "F 1 2 w0")
    assert "(B 1 2 w0): needs what F 1 2 saved, which is not there yet" in reasons(early)


def test_gpipe_needs_room_for_all_micro_batches():
    program = add_communication(gpipe(chain(8, [1, 1])))
    costs = [MICRO_BATCHES] * 2
    assert not check(program, costs=costs, memory_bytes=8)
    assert "may hold 7" in reasons(program, costs=costs, memory_bytes=7)
