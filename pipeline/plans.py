"""What planners produce and everything after them reads: a `Plan`, as JSON on disk.

In:  the decision of a planner.
Out: stages that form a directed acyclic graph (a chain is a special case), where each runs, how, and what the
     planner predicts.

A plan can be read without the profile that it was made from: each stage carries its own cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.errors import PlanError
from pipeline.graph import find_cycle

Schedule = Literal[
    "sequential",
    "gpipe",
    "1f1b",
    "interleaved",
    "pipedream",
    "2bw",
    "zb-h1",
    "zbv",
    "bpipe",
    "bpipe-interleaved",
]
WeightMode = Literal["flush", "stashing", "vertical-sync", "2bw"]
Recompute = Literal["none", "attention", "layer", "stage"]


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs for one of its micro-batches.

    Attributes:
        forward_s: Forward time, seconds.
        backward_s: Time of the whole backward, seconds, with what is recomputed inside the stage
            (`attention`, `layer`) and without another forward pass of all of it (`stage`).
        output_bytes: What it sends along each outgoing edge; the gradient coming back has the same size.
        parameter_bytes: One version of its weights.
        saved_bytes: What it keeps between forward and backward.
        input_bytes: What remains of that when it recomputes: its input.
        state_bytes: What it holds all the time beside its weights: gradients and optimizer state.
        input_fraction: Share of `backward_s` that the gradient of the input takes, when backward is split.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0
    input_bytes: float = 0.0
    state_bytes: float = 0.0
    input_fraction: float = 0.5


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a plan; stages are known by their position.

    Attributes:
        nodes: The model's nodes that it runs.
        replicas: How many copies of it share the micro-batches, round-robin.
        micro_batch: Samples in one of its micro-batches.
        tensor_parallel: Devices that one replica is split over.
        recompute: What it computes again in the backward pass instead of keeping it.
        devices: Devices of each replica, `replicas` tuples of `tensor_parallel` numbers.
        cost: Its cost for one of its micro-batches, on one replica.
    """

    nodes: tuple[str, ...]
    replicas: int = 1
    micro_batch: int = 1
    tensor_parallel: int = 1
    recompute: Recompute = "none"
    devices: tuple[tuple[int, ...], ...] = ()
    cost: StageCost = StageCost()


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the planner's cost model says about the plan.

    Attributes:
        time_s: Seconds per unit of work.
        per: That unit: one `micro-batch` in steady state, or one `batch` with its flush.
        memory_bytes: Peak of one device of each stage; empty when the model has nothing to say about it.
        data_parallel_time_s: The same unit with plain data parallelism, where the model gives it.
    """

    time_s: float
    per: Literal["micro-batch", "batch"]
    memory_bytes: tuple[float, ...] = ()
    data_parallel_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train one model on one cluster.

    Attributes:
        model: Name of the model.
        planner: Which planner made it.
        cost_model: By which of its cost models.
        stages: The stages, topologically ordered.
        edges: Pairs of stage positions along which activations flow.
        schedule: How each rank orders its work.
        weight_mode: Which weights a backward pass sees.
        micro_batches: Micro-batches of the first stage in a batch, over all of its replicas; for a schedule
            that never flushes, how many to run before it drains.
        in_flight: Micro-batches that one replica of the first stage admits before its first backward.
        virtual_stages: Model chunks per device, for the interleaved schedules.
        predicted: What the planner predicts.
    """

    model: str
    planner: str
    cost_model: str
    stages: tuple[Stage, ...]
    edges: tuple[tuple[int, int], ...]
    schedule: Schedule
    weight_mode: WeightMode
    micro_batches: int
    in_flight: int
    predicted: Predicted
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        _one_of("schedule", self.schedule, get_args(Schedule))
        _one_of("weight_mode", self.weight_mode, get_args(WeightMode))
        for name in ("micro_batches", "in_flight", "virtual_stages"):
            _at_least_one(name, getattr(self, name))
        if not self.stages:
            raise PlanError("a plan needs at least one stage.")
        for i, stage in enumerate(self.stages):
            for name in ("replicas", "micro_batch", "tensor_parallel"):
                _at_least_one(f"stage {i}: {name}", getattr(stage, name))
            _one_of(f"stage {i}: recompute", stage.recompute, get_args(Recompute))
            if stage.devices and (
                len(stage.devices) != stage.replicas
                or any(len(group) != stage.tensor_parallel for group in stage.devices)
            ):
                raise PlanError(
                    f"stage {i}: devices {stage.devices} are not {stage.replicas} groups of"
                    f" {stage.tensor_parallel}."
                )
        for edge in self.edges:
            if not all(0 <= end < len(self.stages) for end in edge):
                raise PlanError(
                    f"edge {edge} joins a stage that does not exist; there are {len(self.stages)}."
                )
        if cycle := find_cycle(self.edges):
            raise PlanError(f"the stages form a cycle: {' -> '.join(map(str, cycle))}.")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The JSON value that `plan_from_json` reads back."""
    return asdict(plan)


def plan_from_json(content: Any) -> Plan:
    """A plan from its JSON value.

    Raises:
        PlanError: A key is missing or unknown, or a value is out of range.
    """
    try:
        values = dict(content)
        values["stages"] = tuple(_stage(i, stage) for i, stage in enumerate(content["stages"]))
        values["edges"] = tuple((int(a), int(b)) for a, b in content["edges"])
        predicted = dict(content["predicted"])
        predicted["memory_bytes"] = tuple(predicted.get("memory_bytes", ()))
        values["predicted"] = _make(Predicted, "predicted", predicted)
        plan: Plan = _make(Plan, "plan", values)
    except KeyError as error:
        raise PlanError(f"the plan lacks the key {error}.") from error
    except PlanError:
        raise
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan is malformed: {error}.") from error
    return plan


def read_plan(path: str | Path) -> Plan:
    """A plan from a JSON file."""
    try:
        return plan_from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}.") from error


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a JSON file."""
    Path(path).write_text(json.dumps(plan_to_json(plan), indent=2) + "\n", encoding="utf-8")


def _stage(i: int, content: Mapping[str, Any]) -> Stage:
    values = dict(content)
    values["nodes"] = tuple(content["nodes"])
    values["devices"] = tuple(tuple(group) for group in content.get("devices", ()))
    values["cost"] = _make(StageCost, f"stage {i}: cost", content["cost"])
    stage: Stage = _make(Stage, f"stage {i}", values)
    return stage


def _make(kind: Any, where: str, values: Mapping[str, Any]) -> Any:
    unknown = set(values) - {f.name for f in fields(kind)}
    if unknown:
        raise PlanError(f"{where} has keys that a plan does not: {', '.join(sorted(unknown))}.")
    return kind(**values)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name} is {value!r}; one of {', '.join(choices)}.")


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} is {value!r}; it must be a whole number >= 1.")
