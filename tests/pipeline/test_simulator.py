from __future__ import annotations

import json
from itertools import pairwise

import pytest

from pipeline.actions import Compute, Kind
from pipeline.errors import ProgramError
from pipeline.memory import peaks
from pipeline.passes import add_communication, bpipe
from pipeline.plans import Plan, Predicted, Stage, StageCost
from pipeline.program import chain, parse_program
from pipeline.schedules import gpipe, interleaved, one_f_one_b, pipedream, two_bw
from pipeline.simulator import draw, simulate, simulate_plan, write_trace
from pipeline.timeline import makespan, timeline
from pipeline.topology import Level, Topology, flat
from tests.pipeline.programs import COMPUTATION, PROGRAMS


def costs(program, chunks=1, **sizes) -> list[StageCost]:
    """Forward 1, backward 2, each divided by the chunks of a stage."""
    return [StageCost(1 / chunks, 2 / chunks, **sizes)] * len(program.layout.stages)


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_free_messages_computation_alone_decides(name):
    program = PROGRAMS[name]()
    lengths = {Kind.BACKWARD: 2.0}
    expected = makespan(timeline(COMPUTATION[name](), lambda a: lengths.get(a.kind, 1.0)))
    result = simulate(program, costs(program))
    assert result.makespan_s == pytest.approx(expected)
    for r, actions in enumerate(program.ranks):
        done = [e.action for e in result.events if e.rank == r and isinstance(e.action, Compute)]
        assert done == [a for a in actions if isinstance(a, Compute)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("rendezvous", [True, False])
def test_peaks_in_time_are_those_of_the_program(name, rendezvous):
    program = PROGRAMS[name]()
    sizes = costs(program, output_bytes=3.0, parameter_bytes=5.0, saved_bytes=7.0, input_bytes=2.0)
    topology = flat(program.layout.ranks, 10.0, latency_s=0.1)
    result = simulate(program, sizes, topology, rendezvous=rendezvous)
    assert result.peak_bytes == pytest.approx(peaks(program, sizes))
    for trace in result.memory:
        assert [time for time, _ in trace] == sorted(time for time, _ in trace)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (7, 9)])
def test_the_bubble_is_the_closed_form(p, m):
    for schedule in (gpipe, one_f_one_b):
        program = add_communication(schedule(chain(m, [1] * p)))
        assert simulate(program, costs(program)).bubble == pytest.approx((p - 1) / m)
    program = add_communication(interleaved(p, p * m, 3))
    assert simulate(program, costs(program, 3)).bubble == pytest.approx((p - 1) / (3 * p * m))


def test_a_message_takes_its_latency_and_its_bytes():
    program = add_communication(gpipe(chain(1, [1, 1])))
    topology = flat(2, 4.0, latency_s=0.25)
    # Forward 1, message 0.25 + 8/4, forward 1, backward 2, message, backward 2.
    result = simulate(program, costs(program, output_bytes=8.0), topology)
    assert result.makespan_s == pytest.approx(1 + 2.25 + 1 + 2 + 2.25 + 2)


def test_transfers_over_one_link_take_turns():
    # Two senders on one server, two receivers on another: through one uplink one after the other.
    text = """\
samples 2
stage 0 size 1 update 2 ranks 0 1
stage 1 size 1 update 2 ranks 2 3
edge 0 1
rank 0
  F 0 0 w0
  SEND act 0>1 [0,1) @2
rank 1
  F 0 1 w0
  SEND act 0>1 [1,2) @3
rank 2
  RECV act 0>1 [0,1) @0
  WAIT RECV act 0>1 [0,1) @0
  F 1 0 w0
rank 3
  RECV act 0>1 [1,2) @1
  WAIT RECV act 0>1 [1,2) @1
  F 1 1 w0
"""
    program = parse_program(text)
    sizes = costs(program, output_bytes=3.0)
    for sharing, expected in (("none", 1 + 3 + 1), ("uplink", 1 + 6 + 1), ("medium", 1 + 6 + 1)):
        topology = Topology((Level(2, 100.0), Level(2, 1.0, sharing=sharing)))
        assert simulate(program, sizes, topology).makespan_s == pytest.approx(expected)


def test_rendezvous_waits_for_the_receiver_and_eager_sending_does_not():
    text = """\
samples 1
stage 0 size 1 update 1 ranks 0
stage 1 size 1 update 1 ranks 1
stage 2 size 1 update 1 ranks 1
edge 0 2
rank 0
  F 0 0 w0
  SEND act 0>2 [0,1) @1
rank 1
  F 1 0 w0
  RECV act 0>2 [0,1) @0
  WAIT RECV act 0>2 [0,1) @0
  F 2 0 w0
"""
    program = parse_program(text)
    sizes = [StageCost(1, 2, output_bytes=2.0), StageCost(5, 2), StageCost(1, 2)]
    assert simulate(program, sizes, flat(2, 1.0)).makespan_s == pytest.approx(5 + 2 + 1)
    assert simulate(program, sizes, flat(2, 1.0), rendezvous=False).makespan_s == pytest.approx(5 + 1)


def test_replicas_reduce_together_in_a_ring():
    program = add_communication(gpipe(chain(2, [2])))
    sizes = [StageCost(1, 2, parameter_bytes=10.0)]
    # Forward and backward, then 2 (d-1)/d of 10 bytes at 5 bytes a second.
    assert simulate(program, sizes, flat(2, 5.0)).makespan_s == pytest.approx(3 + 2)
    assert simulate(program, sizes, update_s=[0.5]).makespan_s == pytest.approx(3 + 0.5)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 16), (5, 11), (8, 8), (8, 25), (16, 32)])
def test_bpipe_costs_no_time_while_a_transfer_fits_in_a_forward_pass(p, m):
    before = one_f_one_b(chain(m, [1] * p))
    balanced = add_communication(bpipe(before))
    plain = simulate(add_communication(before), costs(balanced, saved_bytes=1.0))
    result = simulate(balanced, costs(balanced, saved_bytes=1.0), flat(p, 1.0))
    assert result.makespan_s == pytest.approx(plain.makespan_s)
    assert max(result.peak_bytes) <= -(-(p + 2) // 2)
    slow = simulate(balanced, costs(balanced, saved_bytes=1.0), flat(p, 0.2))
    assert slow.makespan_s > plain.makespan_s


@pytest.mark.parametrize(("p", "v"), [(4, 2), (6, 2), (8, 3)])
def test_interleaved_bpipe_costs_no_time_either(p, v):
    before = interleaved(p, 2 * p, v)
    balanced = add_communication(bpipe(before))
    plain = simulate(add_communication(before), costs(balanced, v))
    result = simulate(balanced, costs(balanced, v, saved_bytes=1.0), flat(p, float(v)))
    assert result.makespan_s == pytest.approx(plain.makespan_s)
    assert max(result.peak_bytes) <= p * v + 1


def test_the_critical_path_leads_without_a_gap_from_start_to_end():
    program = add_communication(one_f_one_b(chain(4, [1, 1, 1])))
    result = simulate(program, costs(program, output_bytes=1.0), flat(3, 2.0, latency_s=0.1))
    path = result.critical_path
    assert path[0].start == 0
    assert path[-1].end == result.makespan_s
    for before, after in pairwise(path):
        assert before.end == pytest.approx(after.start)


def test_a_program_that_hangs_is_an_error():
    program = COMPUTATION["gpipe"]()
    text = str(add_communication(program)).replace("  SEND act 0>1 [1,2) @1\n", "")
    with pytest.raises(ProgramError, match=r"rank \d, index \d+: .* waits for ever"):
        simulate(parse_program(text), costs(program))


def test_a_pipeline_that_never_flushes_keeps_the_pace_of_its_slowest_stage():
    program = add_communication(pipedream(chain(60, [1, 1, 1])))
    sizes = [StageCost(1, 2), StageCost(2, 3), StageCost(1, 1)]
    assert simulate(program, sizes).steady_s == pytest.approx(5)
    replicated = add_communication(pipedream(chain(60, [2, 1])))
    assert simulate(replicated, [StageCost(2, 4), StageCost(1, 2)]).steady_s == pytest.approx(3)
    double = add_communication(two_bw(chain(60, [1, 1, 1]), 3))
    assert simulate(double, sizes).steady_s == pytest.approx(5)


def plan_of(replicas: int, schedule: str = "1f1b", chunks: int = 1, micro_batches: int = 4) -> Plan:
    stages = tuple(
        Stage(
            (f"n{s}",),
            replicas,
            devices=tuple(((s % (4 // chunks)) * replicas + r,) for r in range(replicas)),
            cost=StageCost(1.0, 2.0, 0.5, 6.0, 4.0, 0.5),
        )
        for s in range(4)
    )
    return Plan(
        "m",
        "by hand",
        "none",
        stages,
        ((0, 1), (1, 2), (2, 3)),
        schedule,
        "flush",
        micro_batches * replicas,
        4,
        Predicted(1.0, "batch"),
        chunks,
    )


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("bpipe", 1)]
)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_one_replica_stands_for_all_when_they_are_alike(schedule, chunks, replicas):
    plan = plan_of(replicas, schedule, chunks)
    topology = flat(4 // chunks * replicas, 10.0, latency_s=0.01)
    collapsed = simulate_plan(plan, topology)
    full = simulate_plan(plan, topology, collapse=False)
    assert len(collapsed.program.ranks) == 4 // chunks
    assert collapsed.makespan_s == pytest.approx(full.makespan_s)
    assert max(collapsed.peak_bytes) == max(full.peak_bytes)


def test_thousands_of_devices_are_as_quick_as_one_pipeline():
    plan = plan_of(1024, micro_batches=8)
    result = simulate_plan(plan, flat(4096, 10.0))
    assert len(result.program.ranks) == 4
    assert result.makespan_s > 3 * (8 + 3)


def test_a_trace_holds_every_event_and_loads_as_json(tmp_path):
    program = PROGRAMS["bpipe"]()
    result = simulate(program, costs(program, output_bytes=1.0, saved_bytes=1.0), flat(4, 4.0))
    write_trace(result, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(result.events)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(result.makespan_s * 1e6)
    assert {e["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"} == {"process_name"}
    counters = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters) == max(result.peak_bytes)
    # No two computations of a rank overlap.
    for r in range(4):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (0, r))
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(row))


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    program = PROGRAMS["zbv"]()
    draw(simulate(program, costs(program)), tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_96_stages_and_1536_micro_batches_are_simulated():
    program = add_communication(one_f_one_b(chain(1536, [1] * 96)))
    result = simulate(program, costs(program))
    assert result.bubble == pytest.approx(95 / 1536)
