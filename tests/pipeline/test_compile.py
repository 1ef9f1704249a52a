from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.compile import compile_plan, one_replica, rank_devices
from pipeline.errors import PlanError, ProgramError
from pipeline.graph import Cost, ProfiledGraph, chain_graph
from pipeline.memory import MICRO_BATCHES, peaks
from pipeline.planners import pipedream, plan, ptdp, two_bw
from pipeline.planners.ptdp_model import memory
from pipeline.plans import Plan, Stage
from pipeline.simulator import simulate_plan
from pipeline.topology import Level, Topology, flat
from pipeline.transformer import GPT3_96B, Transformer, transformer_profile
from pipeline.validator import check
from tests.pipeline.test_simulator import plan_of

MODEL = Transformer("gpt", 8, 256, 8, 128, 1000)


@pytest.mark.parametrize(
    ("schedule", "replicas", "chunks"),
    [
        ("sequential", 2, 1),
        ("gpipe", 2, 1),
        ("1f1b", 1, 1),
        ("1f1b", 3, 1),
        ("interleaved", 2, 2),
        ("pipedream", 2, 1),
        ("2bw", 2, 1),
        ("zb-h1", 1, 1),
        ("zbv", 1, 1),
        ("bpipe", 2, 1),
        ("bpipe-interleaved", 1, 2),
    ],
)
def test_every_schedule_compiles_to_a_valid_program(schedule, replicas, chunks):
    program = compile_plan(plan_of(replicas, schedule, chunks))
    assert not check(program)


def test_vertical_sync_is_compiled_as_such():
    wanted = replace(plan_of(1, "pipedream", micro_batches=12), weight_mode="vertical-sync")
    assert str(compile_plan(wanted)) != str(compile_plan(replace(wanted, weight_mode="stashing")))


def test_stages_that_recompute_run_forward_twice():
    wanted = plan_of(1)
    stages = (replace(wanted.stages[0], recompute="stage"), *wanted.stages[1:])
    text = str(compile_plan(replace(wanted, stages=stages)))
    assert text.count("RC 0 ") == 4
    assert "RC 1 " not in text


def test_a_plan_may_be_a_graph_of_stages_with_sizes_of_their_own():
    sizes = (4, 2, 6, 4)
    stages = tuple(Stage((f"n{s}",), 1, size) for s, size in enumerate(sizes))
    wanted = replace(plan_of(1), stages=stages, edges=((0, 1), (0, 2), (1, 3), (2, 3)), micro_batches=6)
    program = compile_plan(wanted)
    assert not check(program)
    assert program.layout.samples == 24


def test_ranks_are_the_devices_that_the_plan_places_them_on():
    wanted = plan_of(2, "interleaved", 2)
    assert rank_devices(wanted, compile_plan(wanted).layout) == ((0,), (1,), (2,), (3,))
    swapped = tuple(replace(stage, devices=stage.devices[::-1]) for stage in wanted.stages)
    assert rank_devices(replace(wanted, stages=swapped), compile_plan(wanted).layout) == (
        (1,),
        (0,),
        (3,),
        (2,),
    )


def test_unequal_replicas_cannot_stand_for_each_other():
    wanted = plan_of(2)
    assert one_replica(wanted).micro_batches == 4
    uneven = (replace(wanted.stages[0], replicas=1, devices=()), *wanted.stages[1:])
    assert one_replica(replace(wanted, stages=uneven)) is None


def random_plans() -> list[Plan]:
    """A plan of each planner."""
    graph = chain_graph("m", {str(i): Cost(i + 1, 2 * i + 2, 1e3, 1e4 * i, 2e3) for i in range(6)})
    transformer = transformer_profile(MODEL, flops_per_s=1e12)
    two_levels = Topology((Level(2, 1e9), Level(2, 1e8)), 1e8)
    return [
        plan(graph, flat(4, 1e6), pipedream.Limits()),
        plan(graph, flat(4, 1e6), pipedream.Limits("original")),
        plan(graph, flat(6, 1e6, memory_bytes=1e5), two_bw.Limits(12)),
        plan(graph, flat(6, 1e6), two_bw.Limits(12)),
        plan(transformer, two_levels, ptdp.Limits(MODEL, 16)),
        plan(transformer, two_levels, ptdp.Limits(MODEL, 16, "paper", chunks=(2,))),
    ]


@pytest.mark.parametrize("number", range(6))
def test_what_planners_plan_compiles_to_valid_programs(number):
    wanted = random_plans()[number]
    program = compile_plan(wanted)
    assert not check(program)
    assert simulate_plan(wanted).makespan_s > 0
    first = peaks(program, [MICRO_BATCHES] * len(program.layout.stages))[0]
    assert first <= wanted.in_flight


def test_the_pace_of_a_straight_pipeline_is_what_its_planner_predicts():
    graph = chain_graph("m", {str(i): Cost(3 + i % 3, 5 + i % 2, 10.0, 1e9) for i in range(8)})
    wanted = plan(graph, flat(3, 1e9), pipedream.Limits())
    assert {stage.replicas for stage in wanted.stages} == {1}
    longer = replace(wanted, micro_batches=90)
    assert simulate_plan(longer).steady_s == pytest.approx(wanted.predicted.time_s)


@pytest.mark.parametrize(("chunks", "p"), [(1, 4), (2, 4), (1, 2)])
def test_a_batch_of_equal_stages_takes_what_its_planner_predicts(chunks, p):
    profile = transformer_profile(MODEL, flops_per_s=1e12)
    layer = profile.costs[1]
    costs = tuple(Cost() if node.id in ("embedding", "head") else layer for node in profile.model.nodes)
    limits = ptdp.Limits(MODEL, 16, "paper", (chunks,), ("none",), micro_batches=(1,))
    # No room for more than a p-th of the model, and no heads for tensor parallelism.
    limits = replace(limits, model=replace(MODEL, heads=1))
    possible = [c for c in ptdp.configurations(flat(p, 1e15), limits) if c.pipeline == p]
    room = max(max(memory(limits, c)) for c in possible)
    found = plan(ProfiledGraph(profile.model, costs), flat(p, 1e15, memory_bytes=room), limits)
    assert len(found.stages) == p * chunks
    assert simulate_plan(found).makespan_s == pytest.approx(found.predicted.time_s)


def test_a_simulated_batch_of_a_large_model_is_close_to_the_analytic_one():
    topology = Topology((Level(8, 300e9), Level(4, 25e9)), 80e9)
    profile = transformer_profile(GPT3_96B, flops_per_s=150e12)
    found = plan(profile, topology, ptdp.Limits(GPT3_96B, 128))
    result = simulate_plan(found, topology)
    assert result.makespan_s == pytest.approx(found.predicted.time_s, rel=0.02)
    assert max(result.peak_bytes) == pytest.approx(max(found.predicted.memory_bytes), rel=0.01)


def test_double_buffering_takes_what_its_planner_predicts_in_steady_state():
    blocks = chain_graph("m", {str(i): Cost(1e3, 2e3, 1.0, 1e12) for i in range(4)})
    found = plan(blocks, flat(4, 1e9, memory_bytes=3e12), two_bw.Limits(16))
    assert (found.schedule, len(found.stages)) == ("2bw", 4)
    pace = simulate_plan(found, batches=6).steady_s
    assert pace * found.micro_batches == pytest.approx(found.predicted.time_s, rel=1e-6)


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (plan_of(2, "zb-h1"), PlanError, "not replicated"),
        (plan_of(1, "interleaved", 3), PlanError, "no whole number of 3 chunks"),
        (plan_of(1, "interleaved", 2, 3), ProgramError, "multiple of the 2 ranks"),
        (plan_of(1, "2bw", micro_batches=2), ProgramError, "too few"),
    ],
)
def test_a_plan_that_its_schedule_cannot_run_is_an_error(wanted, error, message):
    with pytest.raises(error, match=message):
        compile_plan(wanted)
