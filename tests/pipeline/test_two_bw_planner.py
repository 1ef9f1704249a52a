"""2BW's planner against a plain enumeration, and against the closed forms for equal blocks."""

from __future__ import annotations

import random
from math import inf

import pytest

from pipeline.errors import PlanError
from pipeline.graph import Cost, ModelGraph, Node, ProfiledGraph, chain_graph
from pipeline.planners import plan
from pipeline.planners.blocks import blocks_of
from pipeline.planners.two_bw import Configuration, Limits, batch_time, memory
from pipeline.topology import Level, Topology, flat

CASES = 500


def random_case(rng: random.Random):
    count = rng.choice([1, 2, 3, 4, 6])
    samples = rng.choice([1, 2])
    graph = chain_graph(
        "random",
        {
            str(i): Cost(
                rng.uniform(1, 9),
                rng.uniform(1, 9),
                rng.uniform(0, 5e3),
                rng.uniform(0, 2e4),
                rng.uniform(1e3, 9e3),
            )
            for i in range(count)
        },
        samples=samples,
    )
    profiles = ()
    if rng.random() < 0.5:  # measured at another size: larger micro-batches take less than in proportion
        costs = tuple(
            Cost(
                c.forward_ms * 3, c.backward_ms * 3, c.output_bytes * 4, c.parameter_bytes, c.saved_bytes * 4
            )
            for c in graph.costs
        )
        profiles = (ProfiledGraph(graph.model, costs, samples * 4),)
    machines = rng.choice([(1,), (2,), (4,), (2, 2), (3, 2)])
    levels = tuple(Level(m, rng.choice([1e6, 1e7, 1e8])) for m in machines)
    topology = Topology(levels, rng.choice([None, 4e4, 8e4, 2e5]))
    return graph, topology, Limits(rng.choice([4, 6, 8, 12]), rng.choice([1.2, 4 / 3]), profiles)


def component(topology: Topology, a: int, b: int) -> float:
    """Bandwidth between two devices, by looking for the smallest component that holds both."""
    width = 1
    for level in topology.levels:
        width *= level.count
        if a // width == b // width:
            return level.bandwidth
    raise AssertionError


def by_enumeration(graph, topology, limits) -> float:
    """Least time per batch over everything, written down again from the formulas."""
    measured = {g.samples: g.costs for g in (graph, *limits.profiles)}
    count, best = len(graph.costs), inf
    for p in range(1, count + 1):
        for d in range(1, topology.devices + 1):
            for b in range(1, limits.batch + 1):
                if count % p or d * p > topology.devices or limits.batch % (d * b):
                    continue
                m = limits.batch // (d * b)
                base = max([s for s in measured if s <= b], default=min(measured))
                scale, length = b / base, count // p
                stages = [measured[base][s * length : (s + 1) * length] for s in range(p)]
                for execution in ("sequential", "2bw", "recompute"):
                    if execution != "sequential" and m < p:
                        continue
                    for device in (lambda s, r, d=d: s * d + r, lambda s, r, p=p: r * p + s):
                        times, bytes_ = [], []
                        for s, stage in enumerate(stages):
                            compute = sum(c.forward_ms + c.backward_ms for c in stage) * scale / 1e3
                            compute *= limits.recompute_factor if execution == "recompute" else 1
                            weights = sum(c.parameter_bytes for c in stage)
                            saved = sum(c.saved_bytes for c in stage) * scale
                            entering = stages[s - 1][-1].output_bytes * scale if s else 0.0
                            sent = 0.0
                            if s:
                                ways = [component(topology, device(s - 1, r), device(s, r)) for r in range(d)]
                                sent = 2 * entering / min(ways)
                            together = 0.0
                            if d > 1:
                                ring = min(
                                    component(topology, device(s, r), device(s, (r + 1) % d))
                                    for r in range(d)
                                )
                                together = 2 * (d - 1) / d * weights / ring / m
                            times.append(max(compute + sent, together))
                            versions, full = (1, 1) if execution == "sequential" else (2, p)
                            held = saved * (p if execution == "2bw" else 1)
                            bytes_.append(versions * weights + held + full * entering)
                        if topology.memory_bytes is None or max(bytes_) <= topology.memory_bytes:
                            best = min(best, m * (sum(times) if execution == "sequential" else max(times)))
    return best


def test_the_objective_is_that_of_a_plain_enumeration():
    rng = random.Random(7)
    kinds = set()
    for _ in range(CASES):
        graph, topology, limits = random_case(rng)
        best = by_enumeration(graph, topology, limits)
        if best == inf:
            with pytest.raises(PlanError, match="fits into"):
                plan(graph, topology, limits)
            kinds.add("none")
            continue
        found = plan(graph, topology, limits)
        assert found.predicted.time_s == pytest.approx(best, rel=1e-9)
        kinds.add((found.schedule, found.stages[0].recompute))
    assert kinds == {"none", ("sequential", "none"), ("2bw", "none"), ("2bw", "stage")}


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_memory_of_equal_blocks_is_the_closed_form(p):
    block = Cost(1, 2, output_bytes=3.0, parameter_bytes=10.0, saved_bytes=7.0)
    blocks = blocks_of(chain_graph("m", {str(i): block for i in range(8)}))
    W, A_total, A_input = 80.0, 56.0, 3.0
    last = {
        execution: memory(blocks, Configuration(1, p, 1, execution, True))[-1]
        for execution in ("sequential", "2bw", "2bw-recompute")
    }
    entering = A_input if p > 1 else 0.0  # the model's own input is not counted
    assert last["2bw"] == pytest.approx(2 * W / p + p * A_total / p + p * entering)
    assert last["2bw-recompute"] == pytest.approx(2 * W / p + A_total / p + p * entering)
    assert last["sequential"] == pytest.approx(W / p + A_total / p + entering)


def test_throughput_of_equal_blocks_is_the_closed_form():
    block = Cost(1e3, 2e3, output_bytes=4e9, parameter_bytes=6e9)
    blocks = blocks_of(chain_graph("m", {str(i): block for i in range(4)}))
    topology, limits = Topology((Level(2, 8e9), Level(2, 2e9))), Limits(batch=8)
    # Two replicas side by side of two stages: all-reduce inside a server, activations between servers.
    time = batch_time(blocks, topology, limits, Configuration(2, 2, 1, "2bw", True))
    m, compute, boundary, synchronise = 4, 2 * 3.0, 2 * 4e9 / 2e9, 2 * (1 / 2) * 12e9 / 8e9
    assert time == pytest.approx(m * max(compute + boundary, synchronise / m))
    # Each pipeline inside a server: the other way round.
    time = batch_time(blocks, topology, limits, Configuration(2, 2, 1, "2bw", False))
    boundary, synchronise = 2 * 4e9 / 8e9, 2 * (1 / 2) * 12e9 / 2e9
    assert time == pytest.approx(m * max(compute + boundary, synchronise / m))
    recomputed = batch_time(blocks, topology, limits, Configuration(2, 2, 1, "2bw-recompute", False))
    assert recomputed == pytest.approx(m * (4 / 3 * compute + boundary))


def test_a_larger_memory_is_never_slower():
    rng = random.Random(11)
    for _ in range(50):
        graph, topology, limits = random_case(rng)
        times = []
        for memory_bytes in (3e4, 6e4, 1e5, None):
            try:
                found = plan(graph, Topology(topology.levels, memory_bytes), limits)
                times.append(found.predicted.time_s)
            except PlanError:
                times.append(inf)
        assert times == sorted(times, reverse=True)


def test_a_model_that_is_no_chain_or_another_models_profile_is_refused():
    diamond = ModelGraph("m", tuple(map(Node, "abc")), (("a", "b"), ("a", "c")))
    with pytest.raises(PlanError, match="no chain of blocks"):
        plan(ProfiledGraph(diamond, (Cost(1),) * 3), flat(2, 1e9), Limits(4))
    chain = chain_graph("m", {"a": Cost(1)})
    with pytest.raises(PlanError, match="is of n"):
        plan(chain, flat(2, 1e9), Limits(4, profiles=(chain_graph("n", {"a": Cost(1)}, samples=2),)))
    with pytest.raises(PlanError, match="at least 1"):
        plan(chain, flat(2, 1e9), Limits(0))
