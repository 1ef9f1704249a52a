"""The evolutionary search, on placements whose times are made up."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.placements import Part, Placement, merged
from placement.search.graph_level import Settings, decode, evolve
from tests.placement.graphs import aten, op_graph, op_graphs

pytest.importorskip("deap", reason="the graph-level search needs DEAP")


def chain(length: int):
    graph = op_graph([(aten.relu.default, [i - 1]) for i in range(length)], [length - 1])
    return graph, Placement.of(graph, [Part(1 << i, "aten") for i in range(length)])


def evaluator(graph, best: frozenset[int]):
    """Time is least when exactly the operations of `best` are on `gpu`, and grows with borders."""

    def evaluate(placements):
        times = []
        for placement in placements:
            on = {
                i for p in placement.parts if p.backend == "gpu" for i in range(len(graph)) if p.mask >> i & 1
            }
            times.append((10 + len(on ^ best) + 0.1 * len(placement.parts)) / 20)
        return times

    return evaluate


def test_it_finds_the_stretch_that_a_graph_level_backend_should_take_over():
    graph, start = chain(12)
    best = frozenset(range(3, 9))
    found = evolve(
        graph, start, ["gpu"], evaluator(graph, best), time.perf_counter() + 60, Settings(patience=40)
    )
    on = {i for p in found.placement.parts if p.backend == "gpu" for i in range(12) if p.mask >> i & 1}
    assert on == best
    assert [s.best for s in found.steps] == sorted((s.best for s in found.steps), reverse=True)


def test_the_same_seed_finds_the_same_and_leaves_pythons_generator_alone():
    graph, start = chain(10)
    evaluate = evaluator(graph, frozenset({1, 2}))
    random.seed(5)
    before = random.getstate()
    runs = [
        evolve(graph, start, ["gpu"], evaluate, time.perf_counter() + 60, Settings(seed=3)) for _ in range(2)
    ]
    assert random.getstate() == before
    assert runs[0].placement == runs[1].placement
    assert [s.best for s in runs[0].steps] == [s.best for s in runs[1].steps]


def test_it_stops_when_nothing_gets_better_and_when_the_time_is_up():
    graph, start = chain(4)
    flat = evolve(graph, start, ["gpu"], lambda ps: [1.0] * len(ps), time.perf_counter() + 60)
    assert flat.stopped == "saturated"
    assert flat.placement == start
    late = evolve(graph, start, ["gpu"], lambda ps: [1.0] * len(ps), time.perf_counter() - 1)
    assert late.stopped == "time"
    assert len(late.steps) == 1


def test_without_graph_level_backends_there_is_nothing_to_search():
    graph, start = chain(3)
    assert evolve(graph, start, [], lambda ps: [], time.perf_counter() + 1).placement == start


def test_the_first_generation_holds_the_start_and_every_single_backend():
    graph, start = chain(5)
    seen: list[Placement] = []

    def evaluate(placements):
        seen.extend(placements)
        return [1.0] * len(placements)

    evolve(graph, start, ["a", "b"], evaluate, time.perf_counter() - 1)
    assert start in seen
    assert Placement.single(graph, "a") in seen
    assert Placement.single(graph, "b") in seen


@given(op_graphs(), st.data())
def test_every_individual_stands_for_a_placement_that_can_run(graph, data):
    start = Placement.of(graph, [Part(1 << i, "aten") for i in range(len(graph))])
    genes = tuple(data.draw(st.integers(0, 2)) for _ in start.parts)
    placement = decode(graph, start, genes, ["a", "b"])
    for part in placement.parts:
        assert graph.is_convex(part.mask)
    wanted = {
        i: ("aten", "a", "b")[g]
        for i, g in zip((p.mask.bit_length() - 1 for p in start.parts), genes, strict=True)
    }
    assert {i: p.backend for p in placement.parts for i in range(len(graph)) if p.mask >> i & 1} == wanted


@given(op_graphs(), st.data())
def test_merging_leaves_no_two_parts_that_could_be_one(graph, data):
    names = [data.draw(st.sampled_from(["a", "aten"])) for _ in range(len(graph))]
    start = Placement.of(graph, [Part(1 << i, n) for i, n in enumerate(names)])
    result = merged(graph, start, ["a"])
    assert all(p.mask.bit_count() == 1 for p in result.parts if p.backend == "aten")
    parts = [p for p in result.parts if p.backend == "a"]
    for left in parts:
        for right in parts:
            reads = any(graph.readers[i] & right.mask for i in range(len(graph)) if left.mask >> i & 1)
            if left is right or not reads:
                continue
            others = [p for p in result.parts if p not in (left, right)]
            with pytest.raises(ValueError, match="wait for each other"):
                Placement.of(graph, [*others, Part(left.mask | right.mask, "a")])
