from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from pipeline.actions import Compute, Kind, Weights
from pipeline.errors import ProgramError
from pipeline.memory import MICRO_BATCHES, peaks
from pipeline.plans import StageCost
from pipeline.program import Program, chain
from pipeline.schedules import gpipe, in_flight, interleaved, one_f_one_b, pipedream, two_bw, zb_h1, zbv
from pipeline.timeline import bubble, makespan, timeline, unit_durations
from tests.pipeline.programs import DIAMOND

DATA = Path(__file__).parent / "data"
TORCH = json.loads((DATA / "torch_schedules_p4m8.json").read_text())
SHARED = {
    "GPipe": lambda v: gpipe(chain(8, [1] * 4)),
    "Interleaved1F1B": lambda v: interleaved(4, 8, v),
    "ZBVZeroBubble": lambda v: zbv(4, 8),
}  # the schedules that torch has too


def held(program: Program) -> tuple[float, ...]:
    """The most micro-batches, or chunks of them, on each rank."""
    return peaks(program, [MICRO_BATCHES] * len(program.layout.stages))


def versions_held(program: Program) -> tuple[float, ...]:
    """The most weight versions on each rank."""
    return peaks(program, [StageCost(parameter_bytes=1.0)] * len(program.layout.stages))


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_the_bubble_is_p_minus_1_over_m(schedule, p):
    for m in {1, p, 2 * p, 3 * p + 1}:
        spans = timeline(schedule(chain(m, [1] * p)), unit_durations())
        assert bubble(spans) == pytest.approx((p - 1) / m, abs=1e-12)


@pytest.mark.parametrize(("p", "v"), list(product(range(1, 17), range(1, 5))))
def test_interleaving_divides_the_bubble_by_the_chunks(p, v):
    for m in {p, 2 * p, 4 * p}:
        spans = timeline(interleaved(p, m, v), unit_durations(v))
        assert bubble(spans) == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize("p", range(1, 17))
def test_in_flight_counts_are_the_published_ones(p):
    for m in {1, p, 2 * p + 1}:
        layout = chain(m, [1] * p)
        assert held(gpipe(layout)) == (m,) * p
        assert held(one_f_one_b(layout)) == tuple(min(p - s, m) for s in range(p))
    for m, v in product((p, 3 * p), range(2, 5)):
        ahead = [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)]
        assert held(interleaved(p, m, v)) == tuple(min(count, m * v) for count in ahead)


def test_replicas_of_the_input_stage_admit_workers_over_replicas():
    # NOAM of PipeDream: ceil(workers / replicas of the input stage), and so on for the stages after it.
    assert in_flight(chain(8, [1, 1, 1, 1])) == (4, 3, 2, 1)
    assert in_flight(chain(8, [2, 1])) == (2, 1)
    assert in_flight(chain(8, [3, 1, 2])) == (2, 3, 1)
    assert in_flight(DIAMOND) == (4, 2, 2, 1)  # 14, 8, 10 and 4 samples from a stage to the loss


@pytest.mark.parametrize(
    "entry", [e for e in TORCH if e["schedule"] in SHARED], ids=lambda e: f"{e['schedule']}-{e['v']}"
)
def test_orders_are_those_of_torch(entry):
    program = SHARED[entry["schedule"]](entry["v"])
    letters = {"F": "F", "B": "B", "BI": "I", "BW": "W"}
    for ours, theirs in zip(program.ranks, entry["ranks"], strict=True):
        mine = [f"{a.stage}{letters[a.kind.value]}{a.micro_batch}" for a in ours if isinstance(a, Compute)]
        assert mine == [action for action in theirs if not action.endswith("REDUCE_GRAD")]
    assert makespan(timeline(program, unit_durations(entry["v"]))) == entry["makespan"]
    assert list(held(program)) == entry["peak_live_chunk_activations"]


@pytest.mark.parametrize("p", range(1, 17))
def test_zb_h1_leaves_a_third_of_the_bubble_and_holds_no_more_than_1f1b(p):
    for m in {1, p, 2 * p, 3 * p + 1}:
        program = zb_h1(p, m)
        idle = makespan(timeline(program, unit_durations())) - 3 * m
        if m >= p:
            assert idle == p - 1  # (p-1)(F + BI - BW) with all three at 1
        assert max(held(program)) <= min(p, m)


@pytest.mark.parametrize("p", range(1, 17))
def test_zbv_leaves_half_a_unit_a_rank_and_balances_what_ranks_hold(p):
    for m in {2 * p - 1, 2 * p, 3 * p + 1}:
        program = zbv(p, m)
        assert makespan(timeline(program, unit_durations(2))) == pytest.approx(3 * m + (p - 1) / 2)
        assert held(program) == (min(2 * p, 2 * m),) * p


def fewest_versions(program: Program) -> tuple[int, ...]:
    """The most versions on each rank that exist at a time and are still to be used, or are the latest."""
    result = []
    for actions in program.ranks:
        last = {a.version: i for i, a in enumerate(actions) if isinstance(a, Compute)}
        latest, most = 0, 1
        for i, a in enumerate(actions):
            if isinstance(a, Weights) and a.kind is Kind.UPDATE:
                latest = a.version
            most = max(most, len({latest} | {v for v, n in last.items() if v <= latest and n >= i}))
        result.append(most)
    return tuple(result)


def test_a_pipeline_that_never_flushes_keeps_the_held_versions_published():
    layout = chain(16, [1] * 4)
    assert versions_held(pipedream(layout)) == (4, 3, 2, 1)
    assert versions_held(two_bw(layout, 4)) == (2, 2, 2, 2)


@pytest.mark.parametrize("p", range(1, 9))
def test_vertical_sync_needs_as_many_versions_at_every_stage_as_at_the_first(p):
    """Input t uses version t-p+1 everywhere, and stage s has made version t-p+s+1 when t comes there: those
    between are for the inputs behind t, one version for each, so that none can be dropped earlier.
    """
    layout = chain(3 * p, [1] * p)
    program = pipedream(layout, vertical_sync=True)
    assert versions_held(program) == fewest_versions(program) == (p,) * p
    assert versions_held(pipedream(layout)) == fewest_versions(pipedream(layout)) == tuple(range(p, 0, -1))


@pytest.mark.parametrize("p", range(1, 9))
def test_stashing_delays_weights_by_the_stages_still_to_come(p):
    # w(t+1) = w(t) - lr * grad(w_1(t-p+1), w_2(t-p+2), ..., w_p(t)); with vertical sync all of them t-p+1.
    n = 3 * p
    for vertical_sync in (False, True):
        program = pipedream(chain(n, [1] * p), vertical_sync=vertical_sync)
        for s, actions in enumerate(program.ranks):
            delay = p - 1 if vertical_sync else p - 1 - s
            for a in actions:
                if isinstance(a, Compute):
                    assert a.version == max(0, a.micro_batch - delay)


@pytest.mark.parametrize(("p", "batch"), [(1, 1), (2, 2), (4, 4), (4, 6), (3, 7)])
def test_2bw_delays_every_stage_by_one_batch_and_keeps_two_versions(p, batch):
    program = two_bw(chain(4 * batch, [1] * p), batch)
    for actions in program.ranks:
        for a in actions:
            if isinstance(a, Compute):
                k = a.micro_batch + 1
                assert a.version == max((k - 1) // batch - 1, 0)
    assert versions_held(program) == (2,) * p


def test_replicas_of_an_asynchronous_stage_update_once_a_round():
    program = pipedream(chain(8, [2, 1]))
    updates = [sum(isinstance(a, Weights) and a.kind is Kind.UPDATE for a in r) for r in program.ranks]
    reduces = [sum(isinstance(a, Weights) and a.kind is Kind.REDUCE for a in r) for r in program.ranks]
    assert updates == [4, 4, 8]
    assert reduces == [4, 4, 0]


def test_1f1b_runs_any_graph_of_stages_and_any_sizes():
    program = one_f_one_b(DIAMOND)
    done = Counter(a.stage for r in program.ranks for a in r if isinstance(a, Compute))
    assert done == {0: 12, 1: 24, 2: 8, 3: 12}
    assert timeline(program, unit_durations())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: interleaved(4, 6, 2), "multiple of the 4 ranks"),
        (lambda: interleaved(0, 6, 2), "must each be at least 1"),
        (lambda: zbv(4, 6), "at least 7 micro-batches"),
        (lambda: two_bw(chain(8, [1] * 4), 2), "too few for two versions"),
        (lambda: two_bw(chain(8, [1] * 2), 3), "no whole number of rounds"),
        (lambda: pipedream(chain(6, [2, 1]), vertical_sync=True), "same number of replicas"),
        (lambda: pipedream(chain(6, [1, 1], sizes=[1, 2])), "one micro-batch size"),
        (lambda: gpipe(interleaved(2, 2, 2).layout), "needs one stage a rank"),
    ],
)
def test_a_schedule_says_what_it_cannot_do(make, message):
    with pytest.raises(ProgramError, match=message):
        make()


def test_an_order_that_cannot_be_kept_is_an_error_that_names_rank_and_index():
    program = one_f_one_b(chain(2, [1, 1]))
    broken = Program(program.layout, (program.ranks[0][::-1], program.ranks[1]))
    with pytest.raises(ProgramError, match=r"rank \d, index \d: . \d \d w0 can never start"):
        timeline(broken, unit_durations())
