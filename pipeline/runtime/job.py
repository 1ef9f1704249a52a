"""A training job: a model, how it is cut and scheduled, and how long it goes on.

In:  a `Job`, from options, from a plan, or from JSON.
Out: its program, its stages and its batches, the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from pipeline.actions import Action, Message, Wait
from pipeline.compile import compile_plan
from pipeline.errors import PlanError
from pipeline.plans import Plan, Predicted, Schedule, Stage, WeightMode, plan_from_json
from pipeline.program import Layout, Program, StageLayout
from pipeline.runtime.stage import StageModule
from pipeline.trainable import Trainable, cut, even_lengths

WEIGHTS: dict[str, WeightMode] = {"pipedream": "stashing", "vertical-sync": "vertical-sync", "2bw": "2bw"}
"""How the schedules that never flush keep weights; all others flush."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, and how.

    Attributes:
        model: Name of the model; see `pipeline.trainable`.
        ranks: Ranks of one pipeline.
        schedule: A schedule of plans, or `vertical-sync` for PipeDream with it.
        micro_batches: Micro-batches of one pipeline in a batch.
        samples: Samples in a micro-batch.
        steps: Batches; for a schedule that never flushes, one program runs them all.
        replicas: Pipelines side by side.
        chunks: Stages on each rank, for interleaved schedules.
        recompute: Whether stages recompute instead of keeping what they save.
        lengths: Layers of each stage; as equal as possible when empty.
        options: Of the model.
        seed: Of weights, data and dropout.
        limit_s: Seconds that a rank waits for another one.
        plan: What the cut and the schedule come from, instead of the fields above; see `job_of_plan`.
    """

    model: str
    ranks: int = 4
    schedule: str = "1f1b"
    micro_batches: int = 8
    samples: int = 1
    steps: int = 10
    replicas: int = 1
    chunks: int = 1
    recompute: bool = False
    lengths: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    limit_s: float = 60.0
    plan: Plan | None = None

    @property
    def flushes(self) -> bool:
        """Whether each batch is a run of the program."""
        return self.schedule not in WEIGHTS

    @property
    def same_order(self) -> bool:
        """Whether gradients are added in the order of one process."""
        sizes = set() if self.plan is None else {stage.micro_batch for stage in self.plan.stages}
        return self.replicas == 1 and len(sizes) <= 1

    @property
    def runs(self) -> int:
        """Runs of the program."""
        return self.steps if self.flushes else 1

    @property
    def stages(self) -> int:
        """Stages of one pipeline."""
        if self.schedule == "zbv":
            return 2 * self.ranks
        return self.ranks * self.chunks if "interleaved" in self.schedule else self.ranks


def job_from_json(content: dict[str, Any]) -> Job:
    """The job that `dataclasses.asdict` was made from."""
    plan = None if content["plan"] is None else plan_from_json(content["plan"])
    return Job(**{**content, "lengths": tuple(content["lengths"]), "plan": plan})


def job_of_plan(model: str, plan: Plan, **more: Any) -> Job:
    """The job of training a model as a plan says.

    Each node of the plan is a layer of the model, in their order. Devices and costs of the plan are not used.

    Args:
        model: Name of the model.
        plan: A chain of stages, from any planner or written by hand.
        more: `steps`, `options`, `seed` and `limit_s` of the job.

    Raises:
        PlanError: The plan has something that a job can't do.
    """
    if plan.edges != tuple((s, s + 1) for s in range(len(plan.stages) - 1)):
        raise PlanError(f"the plan's edges are {plan.edges}; a model of layers runs as a chain of stages.")
    for s, stage in enumerate(plan.stages):
        if stage.tensor_parallel > 1:
            raise PlanError(
                f"stage {s} is split over {stage.tensor_parallel} devices; layers are not split here. Plan"
                " with tensor-parallel degree 1."
            )
        if stage.recompute not in ("none", "stage"):
            raise PlanError(
                f"stage {s} recomputes {stage.recompute!r}, which is inside its layers; here a stage"
                " recomputes all of itself ('stage') or nothing ('none')."
            )
    schedule = "vertical-sync" if plan.weight_mode == "vertical-sync" else plan.schedule
    first = plan.stages[0]
    return Job(
        model,
        ranks=len(plan.stages) // plan.virtual_stages,
        schedule=schedule,
        micro_batches=plan.micro_batches // first.replicas,
        samples=first.micro_batch,
        replicas=max(stage.replicas for stage in plan.stages),
        chunks=plan.virtual_stages,
        recompute=any(stage.recompute == "stage" for stage in plan.stages),
        lengths=tuple(len(stage.nodes) for stage in plan.stages),
        plan=plan,
        **more,
    )


def plan_of(job: Job, layers: int) -> Plan:
    """The job as a plan for a model of so many layers; if made from options, its costs are not known.

    Raises:
        PlanError: Job and model don't go together.
    """
    if job.plan is not None:
        return _given(job, job.plan, layers)
    if job.chunks > 1 and "interleaved" not in job.schedule:
        raise PlanError(f"{job.schedule} has one stage a rank; several chunks go with interleaved.")
    stages, first = [], 0
    for n in lengths_of(job, layers):
        nodes = tuple(map(str, range(first, first + n)))
        stages.append(Stage(nodes, job.replicas, recompute="stage" if job.recompute else "none"))
        first += n
    schedule = cast(Schedule, "pipedream" if job.schedule == "vertical-sync" else job.schedule)
    # Without a flush, each round of micro-batches is a batch.
    micro_batches = job.micro_batches * job.replicas
    if schedule == "pipedream":
        micro_batches *= job.steps
    return Plan(
        model=job.model,
        planner="even",
        cost_model="layers",
        stages=tuple(stages),
        edges=tuple((s, s + 1) for s in range(len(stages) - 1)),
        schedule=schedule,
        weight_mode=WEIGHTS.get(job.schedule, "flush"),
        micro_batches=micro_batches,
        in_flight=1,
        predicted=Predicted(0.0, "batch"),
        virtual_stages=job.chunks,
    )


def _given(job: Job, plan: Plan, layers: int) -> Plan:
    nodes = sum(len(stage.nodes) for stage in plan.stages)
    if nodes != layers:
        raise PlanError(
            f"the plan deals out {nodes} nodes of {plan.model}, and {job.model} has {layers} layers; each"
            " node is a layer. Options of the model (--set) may change how many it has."
        )
    if plan.schedule == "pipedream":  # without a flush, each round of micro-batches is a batch
        return replace(plan, micro_batches=plan.micro_batches * job.steps)
    return plan


def program_of(job: Job, layers: int) -> Program:
    """The program that every rank runs, `job.runs` times, for a model of so many layers."""
    program = compile_plan(plan_of(job, layers), batches=job.steps)
    return program if job.plan is not None else with_samples(program, job.samples)


def lengths_of(job: Job, layers: int) -> tuple[int, ...]:
    """Layers of each stage."""
    return job.lengths or even_lengths(layers, job.stages)


def stage_modules(job: Job, trainable: Trainable, wanted: Iterable[int]) -> dict[int, StageModule]:
    """Some stages with their optimizers."""
    modules = cut(trainable, lengths_of(job, len(trainable.layers)))
    return {s: StageModule(modules[s], _optimizer(trainable, modules[s])) for s in wanted}


def data_of(job: Job, trainable: Trainable, program: Program, run: int) -> dict[int, list[torch.Tensor]]:
    """Inputs of the first stage and targets of the last one, for all samples of one run."""
    inputs, targets = trainable.batch(job.seed * 1_000_003 + run, program.layout.samples)
    last = len(program.layout.stages) - 1
    return {0: [inputs], last: [targets]} if last else {0: [inputs, targets]}


def with_samples(program: Program, samples: int) -> Program:
    """The same program with so many samples for each one."""
    layout = program.layout
    stages = tuple(StageLayout(s.size * samples, s.ranks, s.update * samples) for s in layout.stages)
    scaled = Layout(stages, layout.edges, layout.samples * samples)

    def actions(rank: Iterable[Action]) -> Iterator[Action]:
        for action in rank:
            if isinstance(action, Message):
                yield _scaled(action, samples)
            elif isinstance(action, Wait) and isinstance(action.on, Message):
                yield Wait(_scaled(action.on, samples))
            else:
                yield action

    return Program(scaled, tuple(tuple(actions(rank)) for rank in program.ranks))


def _scaled(message: Message, samples: int) -> Message:
    return message._replace(start=message.start * samples, stop=message.stop * samples)


def _optimizer(trainable: Trainable, module: nn.Module) -> torch.optim.Optimizer | None:
    return trainable.optimizer(module.parameters()) if list(module.parameters()) else None
