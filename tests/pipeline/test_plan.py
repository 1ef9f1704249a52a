from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PlanError
from pipeline.plans import (
    Plan,
    Predicted,
    Stage,
    StageCost,
    plan_from_json,
    plan_to_json,
    read_plan,
    write_plan,
)

DIAMOND = Plan(
    model="m",
    planner="by hand",
    cost_model="none",
    stages=(
        Stage(("a",), 2, 4, devices=((0,), (1,))),
        Stage(("b", "c"), 1, 2, recompute="stage", devices=((2,),), cost=StageCost(1.0, 2.5, 8.0)),
        Stage(("d",), 1, 6, tensor_parallel=2, devices=((3, 4),)),
    ),
    edges=((0, 1), (0, 2), (1, 2)),
    schedule="1f1b",
    weight_mode="flush",
    micro_batches=12,
    in_flight=3,
    predicted=Predicted(1.5, "batch", (1.0, 2.0, 3.0), 4.0),
)

finite = st.floats(0, 1e12, allow_nan=False)
costs = st.builds(StageCost, finite, finite, finite, finite, finite, finite)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 5))
    stages = []
    for i in range(count):
        replicas, tensor = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        groups = tuple(tuple(range(tensor)) for _ in range(replicas)) if draw(st.booleans()) else ()
        recompute = draw(st.sampled_from(["none", "attention", "layer", "stage"]))
        micro_batch = draw(st.integers(1, 8))
        stages.append(Stage((f"n{i}",), replicas, micro_batch, tensor, recompute, groups, draw(costs)))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = tuple(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else ()
    return replace(
        DIAMOND,
        stages=tuple(stages),
        edges=edges,
        predicted=Predicted(draw(finite), "micro-batch", tuple(draw(st.lists(finite, max_size=3)))),
    )


@given(plans())
def test_every_plan_survives_json(plan):
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_a_plan_survives_a_file(tmp_path):
    write_plan(DIAMOND, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == DIAMOND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "magic"}, "schedule is 'magic'; one of sequential, gpipe"),
        ({"weight_mode": "none"}, "weight_mode is 'none'"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"edges": [[0, 9]]}, "joins a stage that does not exist"),
        ({"edges": [[0, 1], [1, 0]]}, "cycle: 0 -> 1 -> 0"),
        ({"stages": []}, "at least one stage"),
        ({"colour": 1}, "keys that a plan does not: colour"),
        ({"stages": 3}, "malformed"),
        ({"predicted": {"time_s": 1, "per": "batch", "speed": 2}}, "predicted has keys"),
    ],
)
def test_a_bad_plan_is_an_error_that_says_what_is_wrong(change, message):
    with pytest.raises(PlanError, match=message):
        plan_from_json(plan_to_json(DIAMOND) | change)


def test_a_plan_that_lacks_a_key_is_an_error_that_names_it():
    content = plan_to_json(DIAMOND)
    del content["edges"]
    with pytest.raises(PlanError, match="lacks the key 'edges'"):
        plan_from_json(content)


def test_devices_must_be_one_group_a_replica():
    with pytest.raises(PlanError, match="stage 0: devices"):
        replace(DIAMOND, stages=(Stage(("a",), 2, devices=((0,),)),), edges=())
