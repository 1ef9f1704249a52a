"""PTD-P's search against a plain enumeration, its closed forms, and its authors' rules."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from pipeline.compile import compile_plan
from pipeline.errors import PlanError
from pipeline.graph import Cost, ProfiledGraph
from pipeline.memory import MICRO_BATCHES, peaks
from pipeline.passes import bpipe
from pipeline.planners import plan
from pipeline.planners.blocks import blocks_of
from pipeline.planners.ptdp import Configuration, Limits, by_the_rules, configurations
from pipeline.planners.ptdp_model import batch_time, chunks_held, memory, transfers_fit
from pipeline.program import chain
from pipeline.schedules import one_f_one_b
from pipeline.topology import Level, Topology, flat
from pipeline.transformer import GPT3_96B, Transformer, layer_saved_bytes, transformer_profile

CASES = 500


def random_case(rng: random.Random):
    model = Transformer(
        "random", rng.choice([2, 4, 6]), 64 * rng.randint(1, 8), rng.choice([2, 4, 6]), 128, 1000
    )
    graph = transformer_profile(model, flops_per_s=1e12)
    profiles = ()
    if rng.random() < 0.5:
        costs = tuple(
            Cost(
                c.forward_ms * 3, c.backward_ms * 3, c.output_bytes * 4, c.parameter_bytes, c.saved_bytes * 4
            )
            for c in graph.costs
        )
        profiles = (ProfiledGraph(graph.model, costs, 4),)
    machines = rng.choice([(1,), (2,), (4,), (2, 2), (4, 2), (2, 4)])
    topology = Topology(tuple(Level(m, rng.choice([1e9, 1e10, 1e11])) for m in machines))
    limits = Limits(
        model,
        rng.choice([4, 8, 12]),
        rng.choice(["paper", "communication"]),
        chunks=rng.choice([(1,), (1, 2), (1, 2, 3)]),
        profiles=profiles,
        scatter_gather=rng.random() < 0.5,
        bpipe=rng.random() < 0.5,
    )
    possible = list(configurations(topology, limits))
    if possible and rng.random() < 0.8:  # what some configuration needs, more or less
        need = max(memory(limits, rng.choice(possible)))
        topology = replace(topology, memory_bytes=need * rng.uniform(0.8, 1.1))
    return graph, topology, limits


def component(topology: Topology, a: int, b: int) -> float:
    """Bandwidth between two devices."""
    width = 1
    for level in topology.levels:
        width *= level.count
        if a // width == b // width:
            return level.bandwidth
    raise AssertionError


def by_enumeration(graph, topology, limits) -> float:
    """Least time per batch over everything, written down again from the formulas."""
    model, n, best = limits.model, topology.devices, inf
    measured = {g.samples: g.costs for g in (graph, *limits.profiles)}
    L, h, a, s, V = model.layers, model.hidden, model.heads, model.sequence, model.vocabulary
    for p, t, b, v in (
        (p, t, b, v)
        for p in range(1, n + 1)
        for t in range(1, n + 1)
        for b in range(1, limits.batch + 1)
        for v in limits.chunks
    ):
        if n % (p * t) or a % t or topology.levels[0].count % t or L % (p * v):
            continue
        d = n // (p * t)
        if limits.batch % (d * b):
            continue
        m = limits.batch // (d * b)
        if v > 1 and (p == 1 or m % p):
            continue
        base = max([x for x in measured if x <= b], default=min(measured))
        embedding, layer, *_, head = measured[base]
        scale = b / base
        for recompute, balanced in product(limits.recompute, (False, True)):
            if balanced and not (limits.bpipe and v == 1 and p >= 4):
                continue
            bound = -(-(p + 2) // 2)
            order = list(range(p))  # which place each stage has along the devices
            if balanced:
                order = [2 * r if r < p // 2 else 2 * (p - 1 - r) + 1 for r in range(p)]
                if p % 2:
                    order[p // 2] = p - 1

            def device(r, k, p=p, d=d, t=t, balanced=balanced, order=order):
                return ((k * p + order[r]) if balanced else (r * d + k)) * t

            per_layer = (
                {"none": 34 + 5 * a * s / h, "attention": 34, "layer": 2 * t}[recompute] * s * b * h / t
            )
            bytes_ = []
            for r in range(p):
                params = L // p * (12 * h * h + 13 * h)
                params += (V + s) * h if r == 0 else 0
                params += V * h if r == p - 1 and p > 1 else 0
                chunks = min(m, p - r) if v == 1 else min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1)
                if balanced:
                    away = max(0, min(m, r + 1) - bound)
                    chunks = min(chunks, bound) + (away + 1 if away else 0)
                attention = 5 * a * s * s * b / t
                working = {"none": 0, "attention": attention, "layer": 34 * s * b * h / t + attention}[
                    recompute
                ]
                bytes_.append(20 * params / t + chunks * L / (p * v) * per_layer + working)
            if topology.memory_bytes is not None and max(bytes_) > topology.memory_bytes:
                continue
            paces, forwards, synchronise = [], [], 0.0
            for r in range(p):
                own = [embedding] * (r == 0) + [layer] * (L // p) + [head] * (r == p - 1)
                forward = sum(c.forward_ms for c in own) * scale / 1e3 / t
                pace = forward + sum(c.backward_ms for c in own) * scale / 1e3 / t
                again = {"none": 0, "layer": 1, "attention": 4 * s / (24 * h + 4 * s)}[recompute]
                pace += again * forward
                if limits.cost_model == "communication":
                    passes = 3 if recompute == "layer" else 2
                    # 8 b s h (t-1)/t numbers of 2 bytes a layer for forward and backward together.
                    tensor = 8 * b * s * h * (t - 1) / t * 2 / topology.levels[0].bandwidth
                    pace += L // p * tensor * passes / 2
                    if p > 1:
                        slowest = min(
                            component(topology, device(k, x), device(k + 1, x))
                            for k in range(p - 1)
                            for x in range(d)
                        )
                        sent = 2 * b * s * h / (t if limits.scatter_gather else 1) / slowest
                        pace += 2 * sent * v
                    if d > 1:
                        ring = min(
                            component(topology, device(r, k), device(r, (k + 1) % d)) for k in range(d)
                        )
                        weights = sum(c.parameter_bytes for c in own) / t
                        synchronise = max(synchronise, 2 * (d - 1) / d * weights / ring)
                paces.append(pace)
                forwards.append(forward)
            if balanced:
                pairs = [(device(r, x), device(p - 1 - r, x)) for r in range(p // 2) for x in range(d)]
                transfer = L / p * per_layer / min(component(topology, *pair) for pair in pairs)
                if transfer > min(forwards):
                    continue
            best = min(best, (m + (p - 1) / v) * max(paces) + synchronise)
    return best


def test_the_objective_is_that_of_a_plain_enumeration():
    rng = random.Random(13)
    infeasible = 0
    seen = set()
    for _ in range(CASES):
        graph, topology, limits = random_case(rng)
        best = by_enumeration(graph, topology, limits)
        if best == inf:
            infeasible += 1
            with pytest.raises(PlanError, match="fits into"):
                plan(graph, topology, limits)
            continue
        found = plan(graph, topology, limits)
        assert found.predicted.time_s == pytest.approx(best, rel=1e-9)
        stage = found.stages[0]
        seen |= {("t", stage.tensor_parallel > 1), ("d", stage.replicas > 1), ("v", found.virtual_stages > 1)}
        seen |= {("p", len(found.stages) > 1), ("r", stage.recompute != "none")}
        seen.add(("b", found.schedule == "bpipe"))
    assert 0 < infeasible < CASES / 2
    assert seen == {(what, yes) for what in "tdvprb" for yes in (False, True)}


@pytest.mark.parametrize(("p", "d", "b"), [(1, 8, 1), (2, 4, 2), (4, 2, 1), (8, 1, 4)])
def test_the_printed_model_counts_micro_batches_and_bubble(p, d, b):
    # (b'/b + p - 1) (tf(b) + tb(b)), b' = B/d, without head so that stages are equal.
    model = Transformer("m", 16, 256, 8, 128, 1)
    graph = transformer_profile(model, flops_per_s=1e12)
    limits = Limits(model, 64, "paper")
    costs = [
        Cost() if node.id in ("embedding", "head") else c
        for node, c in zip(graph.model.nodes, graph.costs, strict=True)
    ]
    blocks = blocks_of(ProfiledGraph(graph.model, tuple(costs)))
    c = Configuration(p, 1, d, b, 1, "none")
    layer = graph.costs[1]
    once = 16 / p * b * (layer.forward_ms + layer.backward_ms) / 1e3
    assert batch_time(blocks, flat(8, 1e9), limits, c) == pytest.approx((64 / d / b + p - 1) * once)
    if p > 1:
        chunked = batch_time(blocks, flat(8, 1e9), limits, replace(c, chunks=2))
        assert chunked == pytest.approx((64 / d / b + (p - 1) / 2) * once)


def test_memory_counts_state_and_what_is_in_flight():
    limits = Limits(GPT3_96B, 128)
    # t=4, p=8, b=2, attention recomputed: 3.48 GB a micro-batch; the first stage holds eight, the last one.
    held = memory(limits, Configuration(8, 4, 1, 2, 1, "attention"))
    assert (held[1] - held[2]) / 1e9 == pytest.approx(3.476, abs=1e-3)
    assert held[0] > held[1] > held[6]


@pytest.mark.parametrize(("p", "m"), [(4, 4), (5, 9), (8, 8), (8, 24), (12, 24)])
def test_bpipe_holds_no_more_than_the_model_says(p, m):
    program = bpipe(one_f_one_b(chain(m, [1] * p)))
    held = peaks(program, [MICRO_BATCHES] * p)
    balanced = Configuration(p, 1, 1, 1, 1, "none", bpipe=True)
    assert all(real <= chunks_held(balanced, m, r) for r, real in enumerate(held))
    assert max(chunks_held(balanced, m, r) for r in range(p)) <= -(-(p + 2) // 2)


@pytest.mark.parametrize("bpipe", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_programs_hold_the_memory_that_the_model_predicts(bpipe, chunks, recompute):
    model = Transformer("gpt", 16, 1024, 8, 512, 1000)
    topology = Topology((Level(2, 1e12), Level(4, 1e12)))
    limits = Limits(model, 16, chunks=(chunks,), recompute=(recompute,), micro_batches=(1,), bpipe=bpipe)
    limits = replace(limits, model=replace(model, heads=1))  # tensor parallelism is out of question
    graph = transformer_profile(limits.model, flops_per_s=1e12)
    tight = min(max(memory(limits, c)) for c in configurations(topology, limits) if c.pipeline > 1)
    found = plan(graph, replace(topology, memory_bytes=tight), limits)
    silent = [replace(stage.cost, output_bytes=0.0) for stage in found.stages]  # buffers are not in the model
    held = peaks(compile_plan(found), silent)
    b = found.stages[0].micro_batch
    again = layer_saved_bytes(limits.model, b) - layer_saved_bytes(limits.model, b, recompute=recompute)
    for real, predicted in zip(held[:: found.stages[0].replicas], found.predicted.memory_bytes, strict=True):
        assert real + again <= predicted * (1 + 1e-12)
    assert max(held) + again == pytest.approx(tight)


def test_bpipe_is_chosen_where_it_makes_room_for_less_recomputation():
    # GPT-3 96B on 32 devices, t=4, p=8, b=2: the published configuration that fits only when balanced.
    topology = Topology((Level(4, 300e9), Level(8, 100e9)))
    graph = transformer_profile(GPT3_96B, flops_per_s=150e12)
    plain = Configuration(8, 4, 1, 2, 1, "attention")
    limits = Limits(GPT3_96B, 128, micro_batches=(2,), chunks=(1,), bpipe=True)
    between = (max(memory(limits, plain)) + max(memory(limits, replace(plain, bpipe=True)))) / 2
    assert transfers_fit(blocks_of(graph), topology, limits, replace(plain, bpipe=True))
    tight = replace(topology, memory_bytes=between)
    balanced = plan(graph, tight, limits)
    without = plan(graph, tight, replace(limits, bpipe=False))
    assert balanced.schedule == "bpipe"
    assert balanced.predicted.time_s < without.predicted.time_s
    assert without.stages[0].recompute == "layer"


def test_a_larger_model_gets_more_model_parallelism_by_the_rules():
    topology = Topology((Level(8, 300e9), Level(8, 25e9)), 80e9)
    sizes = []
    for layers, hidden, heads in ((24, 2304, 24), (36, 4096, 32), (40, 6144, 48), (48, 8192, 64)):
        model = Transformer("gpt", layers, hidden, heads)
        found = by_the_rules(transformer_profile(model, flops_per_s=140e12), topology, Limits(model, 512))
        stage = found.stages[0]
        sizes.append(stage.tensor_parallel * len(found.stages) // found.virtual_stages)
        # The first takeaway: no pipeline before tensor parallelism fills the server.
        assert stage.tensor_parallel == 8 or len(found.stages) == found.virtual_stages
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_the_search_is_never_slower_than_the_rules():
    rng = random.Random(17)
    for _ in range(100):
        graph, topology, limits = random_case(rng)
        try:
            rules = by_the_rules(graph, topology, limits)
        except PlanError:
            continue
        assert plan(graph, topology, limits).predicted.time_s <= rules.predicted.time_s * (1 + 1e-12)


def test_tensor_parallelism_stays_inside_a_server():
    model = Transformer("gpt", 16, 4096, 32)
    topology = Topology((Level(4, 300e9), Level(4, 10e9)), 80e9)
    found = plan(transformer_profile(model, flops_per_s=140e12), topology, Limits(model, 64))
    for stage in found.stages:
        for group in stage.devices:
            assert {device // 4 for device in group} == {group[0] // 4}


def test_wrong_input_is_refused():
    model = Transformer("gpt", 4, 64, 4)
    graph = transformer_profile(model, flops_per_s=1e12)
    with pytest.raises(PlanError, match="one of paper, communication"):
        plan(graph, flat(2, 1e9), Limits(model, 8, "magic"))
    with pytest.raises(PlanError, match="8 layers and head are needed"):
        plan(graph, flat(2, 1e9), Limits(replace(model, layers=8), 8))
    with pytest.raises(PlanError, match="at least 1"):
        plan(graph, flat(2, 1e9), Limits(model, 0))
