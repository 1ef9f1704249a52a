"""The op-level dynamic programme against brute force, and what it promises about its result."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import PlacementError
from placement.graph import bits, mask_of
from placement.placements import Part, Placement
from placement.search.op_level import Candidate, place
from tests.placement.graphs import aten, op_graph, op_graphs


def brute_force(graph, candidates) -> float:
    """The cheapest of all exact covers whose parts can be put in an order."""
    best = float("inf")

    def extend(left: int, chosen: list[Candidate], cost: float) -> None:
        nonlocal best
        if cost >= best:
            return
        if not left:
            try:
                Placement.of(graph, [Part(c.mask, c.backend) for c in chosen])
            except PlacementError:
                return
            best = cost
            return
        first = left & -left
        for candidate in candidates:
            if candidate.mask & first and candidate.mask & left == candidate.mask:
                extend(left & ~candidate.mask, [*chosen, candidate], cost + candidate.cost_s)

    extend(graph.all, [], 0.0)
    return best


@st.composite
def problems(draw):
    graph = draw(op_graphs(most=9))
    count = len(graph)
    masks = [m for m in range(1, 1 << count) if m.bit_count() > 1 and graph.is_convex(m)]
    chosen = draw(st.lists(st.sampled_from(masks), max_size=12)) if masks else []
    singles = [1 << i for i in range(count)]
    cost = st.integers(1, 1000)
    candidates = [Candidate(m, "fused", draw(cost) * m.bit_count() / 3) for m in chosen]
    candidates += [Candidate(m, "aten", float(draw(cost))) for m in singles]
    candidates += [Candidate(m, "other", float(draw(cost))) for m in singles if draw(st.booleans())]
    return graph, candidates


@settings(max_examples=1000)
@given(problems())
def test_the_dynamic_programme_finds_the_cost_that_brute_force_finds(problem):
    graph, candidates = problem
    found = place(graph, candidates)
    assert found.exact
    assert found.cost_s == pytest.approx(brute_force(graph, candidates))
    assert found.cost_s == pytest.approx(sum(c.cost_s for c in found.chosen))
    placement = Placement.of(graph, [Part(c.mask, c.backend) for c in found.chosen])
    assert sum(p.mask for p in placement.parts) == graph.all


@given(problems())
def test_the_chosen_parts_are_given_in_an_order_in_which_they_can_run(problem):
    graph, candidates = problem
    placed = 0
    for candidate in place(graph, candidates).chosen:
        assert not graph.above(candidate.mask) & ~placed
        placed |= candidate.mask


def test_two_convex_parts_that_wait_for_each_other_are_never_chosen_together():
    # 0 -> 1 and 2 -> 3, parts {0, 3} and {1, 2}: each reads from the other.
    graph = op_graph(
        [
            (aten.relu.default, [-1]),
            (aten.neg.default, [0]),
            (aten.exp.default, [-1]),
            (aten.relu.default, [2]),
        ],
        [1, 3],
    )
    crossed = [Candidate(0b1001, "a", 1.0), Candidate(0b0110, "a", 1.0)]
    singles = [Candidate(1 << i, "b", 10.0) for i in range(4)]
    assert place(graph, [*crossed, *singles]).cost_s == 21.0
    with pytest.raises(PlacementError, match="wait for each other"):
        Placement.of(graph, [Part(c.mask, c.backend) for c in crossed])


def test_a_part_that_waits_for_later_operations_is_found():
    # relu(0) feeds both add(2) and neg(1), and add needs neg: {0, 1, 2} only together, {0} first otherwise.
    graph = op_graph([(aten.relu.default, [-1]), (aten.exp.default, [-1]), (aten.add.Tensor, [0, 1])], [2])
    candidates = [Candidate(0b101, "fused", 1.0), *(Candidate(1 << i, "aten", 5.0) for i in range(3))]
    found = place(graph, candidates)
    assert [c.mask for c in found.chosen] == [0b010, 0b101]


def test_an_operation_that_nothing_runs_is_named():
    graph = op_graph([(aten.relu.default, [-1]), (aten.exp.default, [0])], [1])
    with pytest.raises(PlacementError, match="nothing runs %1 = exp"):
        place(graph, [Candidate(1, "aten", 1.0)])


def test_leaving_out_states_is_admitted():
    calls = [(aten.relu.default, [-1]) for _ in range(6)]
    sums = [(aten.add.Tensor, [0, 1]), (aten.add.Tensor, [6, 2]), (aten.add.Tensor, [7, 3])]
    graph = op_graph([*calls, *sums, (aten.add.Tensor, [8, 4]), (aten.add.Tensor, [9, 5])], [10])
    pairs = [mask_of(p) for p in itertools.combinations(range(6), 2)]
    candidates = [Candidate(m, "pair", 1.0) for m in pairs if graph.is_convex(m)]
    candidates += [Candidate(1 << i, "aten", 1.0) for i in range(len(graph))]
    bounded = place(graph, candidates, max_states=1)
    assert not bounded.exact
    assert sorted(i for c in bounded.chosen for i in bits(c.mask)) == list(range(len(graph)))


@given(op_graphs())
def test_a_placement_refuses_overlaps_and_gaps(graph):
    parts = [Part(1 << i, "aten") for i in range(len(graph))]
    with pytest.raises(PlacementError, match="in two parts"):
        Placement.of(graph, [*parts, parts[0]])
    with pytest.raises(PlacementError, match="no part has"):
        Placement.of(graph, parts[1:])
