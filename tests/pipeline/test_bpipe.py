from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.actions import Compute, Kind, Transfer
from pipeline.errors import ProgramError
from pipeline.memory import MICRO_BATCHES, peaks
from pipeline.passes import add_communication, bpipe
from pipeline.passes.balancing import pairs
from pipeline.passes.placement import pair_adjacent, standard
from pipeline.passes.transfers import balanced_capacity, transfer_schedule
from pipeline.plans import StageCost
from pipeline.program import Program, chain
from pipeline.schedules import interleaved, one_f_one_b
from pipeline.simulator import simulate
from pipeline.timeline import timeline, unit_durations
from pipeline.topology import Level, Topology, flat
from pipeline.validator import check
from tests.pipeline.programs import COMPUTATION

DATA = Path(__file__).parent / "data"


def held(program: Program) -> tuple[float, ...]:
    return peaks(program, [MICRO_BATCHES] * len(program.layout.stages))


def evictions(program: Program) -> list[int]:
    return [
        sum(isinstance(a, Transfer) and a.kind is Kind.EVICT for a in actions) for actions in program.ranks
    ]


def published_evictions(p: int, m: int, stage: int) -> int:
    """What the published algorithm evicts, bubbles left out of the sequence (they have no index to evict)."""
    capacity = balanced_capacity(p)
    ahead = min(p - stage, m) - capacity
    order = [a for a in one_f_one_b(chain(m, [1] * p)).ranks[stage] if isinstance(a, Compute)]
    away: set[int] = set()
    count = 0
    for i, a in enumerate(order):
        if a.kind is Kind.FORWARD:
            if capacity - 1 <= a.micro_batch < capacity - 1 + ahead:
                away.add(order[i - 1].micro_batch)
                count += 1
        elif a.micro_batch in away:
            away.discard(a.micro_batch)
            if order[i - 1].kind is Kind.FORWARD:
                away.add(order[i - 3].micro_batch)
                count += 1
    return count


def fewest_evictions(spans, capacity: int, transfer: float) -> int:
    """The least that any choice of transfers needs: at most one each way beside a pass and in each stretch of
    idle time as long as a transfer, holding no more than the capacity at any time. By trying everything.
    """
    items = [(s.action.stage, s.action.micro_batch) for s in spans]
    forward = [s.action.kind is Kind.FORWARD for s in spans]
    idle = [int((b.start - a.end + 1e-9) // transfer) for a, b in pairwise(spans)] + [0]
    never = 10**6

    @cache
    def best(i: int, step: int, here: frozenset, away: frozenset) -> int:
        """Evictions from slot i on; step 0 is the pass itself, the others the idle stretches after it."""
        if i == len(spans):
            return 0
        if step > idle[i]:
            return best(i + 1, 0, here, away)
        own = items[i] if step == 0 else None
        if own is not None and not forward[i] and own not in here:
            return never
        held = here | ({own} if own is not None else set())
        result = never
        for load in (None, *away):
            if len(held) + (load is not None) > capacity:
                continue
            for evict in (None, *(here - {own})):
                after = (held | ({load} if load else set())) - ({evict} if evict else set())
                if own is not None and not forward[i]:
                    after -= {own}
                gone = (away | ({evict} if evict else set())) - ({load} if load else set())
                result = min(
                    result, (evict is not None) + best(i, step + 1, frozenset(after), frozenset(gone))
                )
        return result

    return best(0, 0, frozenset(), frozenset())


@pytest.mark.parametrize("p", range(4, 33))
def test_no_stage_holds_more_than_the_balanced_number(p):
    some = {p, p + 3, 2 * p, 3 * p + 1}
    for m in range(p, 3 * p + 2) if p < 9 else some:
        program = bpipe(one_f_one_b(chain(m, [1] * p)))
        assert max(held(program)) <= -(-(p + 2) // 2)
        assert evictions(program) == [published_evictions(p, m, s) for s in range(p)]


@pytest.mark.parametrize("p", range(2, 13))
def test_the_interleaved_variant_keeps_its_own_bound(p):
    for v in (2, 3, 4):
        for m in (p, 2 * p, 3 * p):
            before = interleaved(p, m, v)
            program = bpipe(before)
            assert max(held(program)) <= min(p * v + 1, max(held(before)))
            for r, count in enumerate(evictions(program)):
                assert (count > 0) == (held(before)[r] > p * v + 1)
                if m >= 2 * p:
                    assert evictions_beside_warm_up(program, r) == max(0, p - 2 * (r + 1))


def evictions_beside_warm_up(program: Program, rank: int) -> int:
    """Evictions that start beside a forward pass before the first backward pass."""
    count = beside = 0
    for a in program.ranks[rank]:
        if isinstance(a, Compute):
            if a.kind is Kind.BACKWARD:
                break
            beside = count
        count += isinstance(a, Transfer) and a.kind is Kind.EVICT
    return beside


@pytest.mark.parametrize(
    ("p", "m"), [(4, 4), (4, 5), (4, 6), (4, 9), (5, 6), (5, 8), (6, 6), (6, 7), (6, 9), (7, 8), (8, 8)]
)
def test_no_choice_of_transfers_needs_fewer(p, m):
    spans = timeline(one_f_one_b(chain(m, [1] * p)), unit_durations())
    for s in range(p // 2):
        slots = transfer_schedule(spans[s], balanced_capacity(p), 1.0)
        ours = sum(slot.evict is not None for slot in slots)
        assert ours == fewest_evictions(spans[s], balanced_capacity(p), 1.0)


def furthest_in_the_future(actions, places: int) -> int:
    """Evictions of the policy that, whenever a place is needed, evicts what is used last.

    It moves things in no time: who moves them beside computation needs one more place, for what is under way.
    """
    order = [a for a in actions if isinstance(a, Compute)]
    use = {(a.stage, a.micro_batch): i for i, a in enumerate(order) if a.kind is Kind.BACKWARD}
    here: set[tuple[int, int]] = set()
    count = 0
    for a in order:
        item = a.stage, a.micro_batch
        if item not in here and len(here) == places:
            here.discard(max(here, key=use.__getitem__))
            count += 1
        here.add(item)
        if a.kind is Kind.BACKWARD:
            here.discard(item)
    return count


@pytest.mark.parametrize("p", range(4, 33))
def test_the_optimal_replacement_policy_needs_no_fewer_transfers(p):
    some = {p, p + 3, 2 * p, 3 * p + 1}
    for m in range(p, 3 * p + 2) if p < 9 else some:
        before = one_f_one_b(chain(m, [1] * p))
        for r, ours in enumerate(evictions(bpipe(before))):
            assert ours <= furthest_in_the_future(before.ranks[r], balanced_capacity(p) - 1)


@pytest.mark.parametrize("p", range(2, 13))
def test_nor_does_it_for_interleaved_stages(p):
    for v, m in ((2, p), (2, 2 * p), (3, 2 * p), (4, 3 * p)):
        before = interleaved(p, m, v)
        for r, ours in enumerate(evictions(bpipe(before))):
            assert ours <= furthest_in_the_future(before.ranks[r], balanced_capacity(p, v) - 1)


@pytest.mark.parametrize(("p", "v"), [(4, 2)])
def test_no_choice_of_transfers_needs_fewer_when_interleaved(p, v):
    spans = timeline(interleaved(p, 2 * p, v), unit_durations(v))
    for r in range(p // 2):
        slots = transfer_schedule(spans[r], balanced_capacity(p, v), 1.0 / v)
        ours = sum(slot.evict is not None for slot in slots)
        assert ours == fewest_evictions(spans[r], balanced_capacity(p, v), 1.0 / v)


@pytest.mark.parametrize(
    "entry", json.loads((DATA / "bpipe_p4.json").read_text()), ids=lambda e: f"m{e['m']}"
)
def test_four_stages_do_as_well_as_the_reference(entry):
    before = one_f_one_b(chain(entry["m"], [1] * entry["p"]))
    program = bpipe(before)
    assert held(before) == tuple(entry["peak_1f1b"])
    assert max(held(program)) <= entry["bound"] == max(entry["peak_bpipe"])
    assert all(ours <= theirs for ours, theirs in zip(evictions(program), entry["evicts"], strict=True))
    assert [list(pair) for pair in pairs(program.layout)] == entry["pairs"]


def test_the_transfers_of_four_stages_are_those_of_the_published_figure():
    program = bpipe(one_f_one_b(chain(8, [1, 1, 1, 1])))
    assert [str(a) for a in program.ranks[0] if not str(a).startswith(("F", "B", "WAIT"))] == [
        "EVICT 0 1 @3",
        "EVICT 0 3 @3",
        "LOAD 0 1 @3",
        "EVICT 0 5 @3",
        "LOAD 0 3 @3",
        "LOAD 0 5 @3",
        "UPDATE 0 w1",
    ]
    assert not any(isinstance(a, Transfer) for r in (1, 2) for a in program.ranks[r])


@pytest.mark.parametrize("p", [4, 7, 12])
def test_programs_with_transfers_are_valid(p):
    for before in (one_f_one_b(chain(2 * p, [1] * p)), interleaved(p, 2 * p, 2)):
        assert not check(add_communication(bpipe(before)))


@pytest.mark.parametrize("v", [1, 2])
def test_the_bound_holds_whatever_the_passes_take(v):
    rng = random.Random(v)
    slower = 0
    for _ in range(60):
        p = rng.randint(4, 9)
        m = p * rng.randint(1, 3)
        forward = [rng.uniform(0.5, 2) for _ in range(p * v)]
        costs = [StageCost(f, f * rng.uniform(1, 3), saved_bytes=1.0) for f in forward]

        def durations(action, costs=costs):
            cost = costs[action.stage]
            return cost.forward_s if action.kind is Kind.FORWARD else cost.backward_s

        before = one_f_one_b(chain(m, [1] * p)) if v == 1 else interleaved(p, m, v)
        program = bpipe(before, durations=durations)
        assert max(held(program)) <= balanced_capacity(p, v)
        balanced = add_communication(program)
        assert not check(balanced)
        plain = simulate(add_communication(before), costs).makespan_s
        slower += simulate(balanced, costs, flat(p, 1 / min(forward))).makespan_s > plain * (1 + 1e-9)
    assert slower <= 2  # an acceptor that has no room yet makes its evictor wait


def test_the_order_of_computation_stays():
    before = COMPUTATION["1f1b"]()
    after = bpipe(before)
    for ours, theirs in zip(after.ranks, before.ranks, strict=True):
        assert [a for a in ours if isinstance(a, Compute)] == [a for a in theirs if isinstance(a, Compute)]


def test_a_capacity_that_transfers_cannot_keep_is_an_error():
    with pytest.raises(ProgramError, match="transfers can't keep up"):
        bpipe(one_f_one_b(chain(16, [1] * 8)), capacity=2)


def test_stages_that_are_not_dealt_out_in_turn_are_refused():
    with pytest.raises(ProgramError, match="equal replicas"):
        bpipe(one_f_one_b(chain(6, [2, 1])))


def test_pair_adjacent_placement_is_that_of_the_published_figure():
    # 4 stages, 2-way tensor and 2-way data parallelism on two servers of 8: stages 0, 3, 1, 2 side by side.
    placement = pair_adjacent(4, replicas=2, tensor_parallel=2)
    by_device = {d: s for s, replicas in enumerate(placement) for group in replicas for d in group}
    assert [by_device[d] for d in range(16)] == [0, 0, 3, 3, 1, 1, 2, 2] * 2


@pytest.mark.parametrize(("stages", "per_server"), [(16, 8), (8, 4), (12, 4)])
def test_pair_adjacent_placement_keeps_pairs_inside_servers_and_the_standard_one_does_not(stages, per_server):
    topology = Topology((Level(per_server, 100e9), Level(stages // per_server, 10e9)))

    def crossing(placement):
        ends = [(placement[s][0][0], placement[stages - 1 - s][0][0]) for s in range(stages // 2)]
        return sum(topology.level_between(a, b) > 0 for a, b in ends)

    assert crossing(pair_adjacent(stages)) == 0
    assert crossing(standard(stages)) > 0


def test_every_device_gets_one_stage():
    for make in (standard, pair_adjacent):
        devices = [d for s in make(5, replicas=3, tensor_parallel=2) for group in s for d in group]
        assert sorted(devices) == list(range(30))
