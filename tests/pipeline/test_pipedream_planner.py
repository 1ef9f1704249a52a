"""PipeDream's planner against everything there is to try, and against published values."""

from __future__ import annotations

import json
import random
from itertools import combinations
from math import ceil, inf
from pathlib import Path

import pytest

from pipeline.errors import GraphError, PlanError
from pipeline.graph import Cost, ModelGraph, Node, ProfiledGraph, chain_graph
from pipeline.ideals import states, without_ends
from pipeline.planners import plan
from pipeline.planners.pipedream import Limits
from pipeline.plans import plan_from_json, plan_to_json
from pipeline.profiles import read_profile, read_profiles
from pipeline.topology import Level, Topology, flat

DATA = Path(__file__).parent / "data"
CASES = 500


def topology_of(machines, bandwidths, memory=None) -> Topology:
    levels = (Level(m, b) for m, b in zip(machines, bandwidths, strict=True))
    return Topology(tuple(levels), memory)


@pytest.mark.parametrize("entry", json.loads((DATA / "original_optimizer_examples.json").read_text()))
def test_the_original_cost_model_gives_what_the_published_optimizer_gives(entry):
    limits = Limits(
        "original",
        straight=entry["straight"],
        check_memory=entry["use_memory_constraint"],
        fewer_machines=entry["use_fewer_machines"],
        compression=entry["activation_compression_ratio"],
    )
    topology = topology_of(entry["all_num_machines"], entry["network_bandwidths"], entry["memory_size"])
    graph = read_profile(DATA / "profiles.json", entry["model"])
    predicted = plan(graph, topology, limits).predicted
    assert predicted.time_s == pytest.approx(entry["pipeline_time_s"], rel=1e-9)
    assert predicted.data_parallel_time_s == pytest.approx(entry["dp_time_s"], rel=1e-9)
    assert len(states(without_ends(graph))) == entry["n_states"]


@pytest.mark.parametrize("entry", json.loads((DATA / "paper_recurrence_examples.json").read_text()))
def test_the_paper_cost_model_gives_what_the_printed_recurrence_gives(entry):
    topology = topology_of(entry["machines"], entry["bandwidths"])
    predicted = plan(read_profile(DATA / "profiles.json", entry["model"]), topology, Limits()).predicted
    assert predicted.time_s == pytest.approx(entry["time_s"], rel=1e-9)
    assert predicted.data_parallel_time_s == pytest.approx(entry["dp_time_s"], rel=1e-9)


# -- Everything there is to try
# ---------------------------------------------------------------------------------


def random_graph(rng: random.Random, most: int, *, chain: bool) -> ProfiledGraph:
    """A chain, or a graph with one source whose nodes each read one or two earlier ones."""
    count = rng.randint(1, most)
    edges = [(str(i), str(i + 1)) for i in range(count - 1)]
    if not chain:
        edges = [
            (str(a), str(b))
            for b in range(1, count)
            for a in sorted(rng.sample(range(b), min(b, rng.randint(1, 2))))
        ]
    costs = tuple(
        Cost(rng.randint(0, 9), rng.randint(1, 20), rng.randint(0, 30), rng.choice([0, rng.randint(0, 60)]))
        for _ in range(count)
    )
    return ProfiledGraph(ModelGraph("random", tuple(Node(str(i)) for i in range(count)), tuple(edges)), costs)


def random_topology(rng: random.Random) -> Topology:
    machines = rng.choice([[1], [2], [3], [4], [2, 2], [2, 3], [3, 2]])
    return topology_of(
        machines, [rng.choice([1e3, 3e3, 1e4, 1e5]) for _ in machines], rng.choice([50, 150, 400.0])
    )


def ideals(graph: ProfiledGraph) -> list[frozenset[str]]:
    """Every set of nodes that holds the predecessors of its members, the source among them."""
    ids = [node.id for node in graph.model.nodes]
    found = []
    for size in range(1, len(ids) + 1):
        for chosen in combinations(ids, size):
            inside = frozenset(chosen)
            if ids[0] in inside and all(a in inside for a, b in graph.model.edges if b in inside):
                found.append(inside)
    return found


def pipelines(cuts, start: frozenset, end: frozenset, machines: int):
    """Every way to cut what lies between two ideals into stages with replicas that use all machines."""
    if start < end:
        yield [(start, end, machines)]
    for middle in cuts:
        if start < middle < end:
            for replicas in range(1, machines):
                for before in pipelines(cuts, start, middle, machines - replicas):
                    yield [*before, (middle, end, replicas)]


def paper_time(graph, cuts, topology, k, start, end) -> float:
    """The best time of a part on one component of level k, trying every pipeline at every level."""
    part = graph.total(end - start)
    if k < 0:
        return (part.forward_ms + part.backward_ms) / 1e3
    level, costs = topology.levels[k], graph.cost_of()
    best = inf
    for stages in pipelines(cuts, start, end, level.count):
        slowest = 0.0
        for n, (a, b, replicas) in enumerate(stages):
            compute = paper_time(graph, cuts, topology, k - 1, a, b)
            synchronise = 2 * (replicas - 1) * graph.total(b - a).parameter_bytes / level.bandwidth
            slowest = max(slowest, max(compute, synchronise) / replicas)
            if n:
                crossing = {x for x, y in graph.model.edges if x in a and y not in a}
                slowest = max(slowest, 2 * sum(costs[x].output_bytes for x in crossing) / level.bandwidth)
        best = min(best, slowest)
    return best


@pytest.mark.parametrize("chain", [True, False])
def test_the_paper_objective_is_that_of_the_best_of_all_pipelines(chain):
    rng = random.Random(1 + chain)
    for _ in range(CASES):
        graph, topology = random_graph(rng, 5, chain=chain), random_topology(rng)
        cuts = ideals(graph)
        best = paper_time(graph, cuts, topology, len(topology.levels) - 1, frozenset(), cuts[-1])
        found = plan(graph, topology, Limits())
        assert found.predicted.time_s == pytest.approx(best, rel=1e-9)
        assert found.predicted.time_s == pytest.approx(paper_time_of(found, graph, topology), rel=1e-9)


def paper_time_of(found, graph, topology) -> float:
    """Time of the slowest stage, counted from the plan where there is one level; for more, as predicted."""
    if len(topology.levels) > 1:
        return found.predicted.time_s
    bandwidth, slowest = topology.levels[0].bandwidth, 0.0
    for n, stage in enumerate(found.stages):
        total = graph.total(stage.nodes)
        compute = (total.forward_ms + total.backward_ms) / 1e3
        synchronise = 2 * (stage.replicas - 1) * total.parameter_bytes / bandwidth
        slowest = max(slowest, max(compute, synchronise) / stage.replicas)
        if n:
            slowest = max(slowest, 2 * stage.cost.input_bytes / bandwidth)
    return slowest


def original_time(graph, cuts, topology, limits, k, start, end) -> float:
    """The same as the published optimizer counts."""
    part = graph.total(end - start)
    if k < 0:
        return (part.forward_ms + part.backward_ms) / 1e3
    level = topology.levels[k]
    within = topology.levels[k - 1].count if k else 1
    sizes = range(1, level.count + 1) if limits.fewer_machines else [level.count]
    best = inf
    for stages in (s for m in sizes for s in pipelines(cuts, start, end, m)):
        if limits.straight and any(replicas > 1 for _, _, replicas in stages):
            continue
        slowest, used = 0.0, 0
        for n, (a, b, replicas) in enumerate(stages):
            used += replicas
            stage = graph.total(b - a)
            synchronise = 4 * (replicas - 1) * stage.parameter_bytes / (level.bandwidth * replicas)
            synchronise /= 1 if n else within
            compute = original_time(graph, cuts, topology, limits, k - 1, a, b)
            slowest = max(slowest, (compute + synchronise) / replicas)
            # The first stage counts its own replicas only, the others all machines up to and with theirs.
            in_flight = ceil((level.count - (used if n else replicas)) / replicas)
            stashed = in_flight * (stage.output_bytes + stage.parameter_bytes)
            if limits.check_memory and stashed > topology.memory_bytes:
                slowest = inf
            if limits.compression and n:
                ends = [a] if b == cuts[-1] else [a, b]
                sent = max(counted(graph, cut) for cut in ends)
                slowest = max(slowest, 2 * sent / (level.bandwidth * replicas) / limits.compression)
        best = min(best, slowest)
    return best


def counted(graph, ideal) -> float:
    """Outputs of the maximal nodes of an ideal, and of those below one of them that lead past it."""
    after = {v: {b for a, b in graph.model.edges if a == v} for v in ideal}

    def below(v):
        direct = {a for a, b in graph.model.edges if b == v}
        return direct.union(*map(below, direct)) if direct else set()

    maximal = {v for v in ideal if not after[v] & ideal}
    past = {u for v in maximal for u in below(v) if after[u] - below(v) - {v}}
    costs = graph.cost_of()
    return sum(costs[v].output_bytes for v in maximal | past)


@pytest.mark.parametrize("chain", [True, False])
def test_the_original_objective_is_that_of_the_best_of_all_pipelines(chain):
    rng = random.Random(3 + chain)
    feasible = 0
    for _ in range(CASES):
        graph, topology = random_graph(rng, 5, chain=chain), random_topology(rng)
        limits = Limits(
            "original",
            straight=rng.random() < 0.2,
            check_memory=rng.random() < 0.4,
            fewer_machines=rng.random() < 0.3,
            compression=rng.choice([None, 1.0, 2.0]),
        )
        cuts = ideals(graph)
        best = original_time(graph, cuts, topology, limits, len(topology.levels) - 1, frozenset(), cuts[-1])
        if best == inf:
            with pytest.raises(PlanError, match="fits within the limits"):
                plan(graph, topology, limits)
            continue
        feasible += 1
        assert plan(graph, topology, limits).predicted.time_s == pytest.approx(best, rel=1e-9)
    assert feasible > CASES / 2


def test_states_of_a_graph_with_one_source_are_all_of_its_ideals():
    rng = random.Random(5)
    for _ in range(200):
        graph = random_graph(rng, 7, chain=False)
        found = states(graph)
        assert {s.nodes for s in found} == set(ideals(graph))
        for s in found:
            assert s.counted_bytes == counted(graph, s.nodes)


# -- What a plan looks like
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
@pytest.mark.parametrize("cost_model", ["paper", "original"])
def test_a_plan_places_every_node_once_and_every_device_once(name, cost_model):
    graph = read_profiles(DATA / "profiles.json")[name]
    topology = topology_of([4, 2], [10e9, 1.25e9])
    found = plan(graph, topology, Limits(cost_model))
    placed = [node for stage in found.stages for node in stage.nodes]
    assert sorted(placed) == sorted(node.id for node in graph.model.nodes)
    devices = [d for stage in found.stages for group in stage.devices for d in group]
    assert sorted(devices) == list(range(8))
    assert [len(stage.devices) for stage in found.stages] == [stage.replicas for stage in found.stages]
    order = {node: s for s, stage in enumerate(found.stages) for node in stage.nodes}
    assert all(order[a] <= order[b] for a, b in graph.model.edges)
    assert found.in_flight == ceil(8 / found.stages[0].replicas)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(found)))) == found


def test_a_small_model_with_large_parameters_is_not_replicated():
    graph = chain_graph("m", {"a": Cost(1, 1, 0, 0), "b": Cost(1, 1, 0, 1e9)})
    found = plan(graph, flat(2, 1e6), Limits())
    assert [stage.replicas for stage in found.stages] == [1, 1]
    assert found.in_flight == 2


@pytest.mark.parametrize(
    ("graph", "limits", "message"),
    [
        (chain_graph("m", {"a": Cost(1)}), Limits("magic"), "one of paper, original"),
        (chain_graph("m", {"a": Cost(1)}), Limits(check_memory=True), "options of the cost model `original`"),
        (chain_graph("m", {"a": Cost(1)}), Limits("original", check_memory=True), "doesn't say how much"),
        (chain_graph("m", {"a": Cost(1)}), Limits("original", compression=-1), "must be positive"),
        (chain_graph("m", {"a": Cost(1)}), Limits(straight=True), "no plan for 2 devices"),
    ],
)
def test_limits_that_cannot_be_met_are_an_error(graph, limits, message):
    with pytest.raises(PlanError, match=message):
        plan(graph, flat(2, 1e9), limits)


def test_a_graph_that_cannot_be_cut_into_a_pipeline_is_refused():
    apart = ProfiledGraph(ModelGraph("m", (Node("a"), Node("b")), ()), (Cost(1), Cost(1)))
    with pytest.raises(GraphError, match="falls apart"):
        plan(apart, flat(2, 1e9), Limits())
    wide = [
        ("in", f"{branch}.{i}") if i == 0 else (f"{branch}.{i - 1}", f"{branch}.{i}")
        for branch in range(8)
        for i in range(4)
    ]
    nodes = (Node("in"), *(Node(b) for _, b in wide))
    with pytest.raises(GraphError, match="more than 5000 ways to cut"):
        states(ProfiledGraph(ModelGraph("m", nodes, tuple(wide)), (Cost(),) * len(nodes)))
    with pytest.raises(GraphError, match="no nodes"):
        plan(chain_graph("m", {}), flat(2, 1e9), Limits())
