from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import ProgramError
from pipeline.memory import MICRO_BATCHES, peaks
from pipeline.passes import add_communication
from pipeline.program import chain
from pipeline.schedules import one_f_one_b
from pipeline.timeline import makespan, timeline, unit_durations
from pipeline.torch_text import from_torch, to_torch
from pipeline.validator import check
from tests.pipeline.programs import PROGRAMS

DATA = Path(__file__).parent / "data"
TORCH = json.loads((DATA / "torch_schedules_p4m8.json").read_text())


def named(entry) -> str:
    return f"{entry['schedule']}-{entry['v']}"


@pytest.mark.parametrize("entry", TORCH, ids=named)
def test_orders_that_torch_emits_are_accepted(entry):
    program = from_torch(entry["ranks"])
    assert not check(program)
    held = peaks(program, [MICRO_BATCHES] * len(program.layout.stages))
    assert list(held) == entry["peak_live_chunk_activations"]
    time = makespan(timeline(program, unit_durations(entry["v"])))
    if entry["schedule"] == "DualPipeV":  # torch starts the two passes of an overlapping pair together
        assert time <= entry["makespan"]
    else:
        assert time == entry["makespan"]


@pytest.mark.parametrize("entry", TORCH, ids=named)
def test_programs_that_torch_has_lowered_are_accepted_by_tags_and_in_order(entry):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_add_send_recv"):
        pytest.skip("this torch lowers its schedules in another way")
    actions = {r: [schedules._Action.from_str(a) for a in row] for r, row in enumerate(entry["ranks"])}
    if entry["schedule"] == "GPipe":
        actions = {r: [a for a in row if "REDUCE" not in str(a)] for r, row in actions.items()}
    owners = [stage.ranks[0] for stage in from_torch(entry["ranks"]).layout.stages]
    lowered = schedules._add_send_recv(actions, owners.__getitem__, len(owners))
    program = from_torch([[str(a) for a in lowered[r]] for r in range(4)])
    assert not check(program, matching="tags")
    assert not check(program, matching="fifo")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_what_torch_can_express_survives_its_text(name):
    program = PROGRAMS[name]()
    again = from_torch(to_torch(program))
    assert not check(again, matching="tags")
    assert not check(again, matching="fifo")
    assert to_torch(again) == to_torch(program)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bpipe", "rank 0: torch has no word for EVICT"),
        ("1f1b, recomputed", "rank 0: torch has no word for RC"),
        ("pipedream", "torch runs one batch; stage 0 has an update every 1 samples"),
        ("1f1b, diamond", "torch runs chains of stages"),
        ("1f1b, two replicas", "torch has no replicas in a schedule; stage 0 is on ranks"),
        ("1f1b, unequal sizes", "torch has one micro-batch size; stage 1 has 2 and stage 0 4"),
    ],
)
def test_what_torch_has_no_word_for_is_refused(name, message):
    with pytest.raises(ProgramError, match=message):
        to_torch(PROGRAMS[name]())


def test_micro_batches_of_several_samples_are_numbered_for_torch():
    single = PROGRAMS["1f1b"]()
    program = add_communication(one_f_one_b(chain(6, [1, 1, 1, 1], sizes=[3, 3, 3, 3])))
    assert to_torch(program) == to_torch(single)


def test_messages_read_as_torch_writes_them():
    program = from_torch(
        [
            ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD"],
            ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
        ]
    )
    assert [str(a) for a in program.ranks[1]] == [
        "RECV act 0>1 [0,1) @0",
        "WAIT RECV act 0>1 [0,1) @0",
        "F 1 0 w0",
        "B 1 0 w0",
        "SEND grad 1>0 [0,1) @0",
        "UPDATE 1 w1",
    ]
    assert not check(program)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0X0"]], "'0X0' is no action"),
        ([["0F0"], ["0F1"]], "stage 0 is on rank 0 and on rank 1"),
        ([["1F0"]], "without gaps"),
        ([["0F0", "0SEND_F0"]], "a stage that does not exist"),
    ],
)
def test_rows_that_make_no_sense_are_refused(rows, message):
    with pytest.raises(ProgramError, match=message):
        from_torch(rows)
