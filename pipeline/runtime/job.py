"""A training job: a model, how it is cut and scheduled, and how long it goes on.

In:  a `Job`, from the command line or from JSON.
Out: its program, its stages and its batches, the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from pipeline.actions import Action, Message, Wait
from pipeline.compile import compile_plan
from pipeline.errors import PlanError
from pipeline.plans import Plan, Predicted, Schedule, Stage, WeightMode
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

    @property
    def flushes(self) -> bool:
        """Whether each batch is a run of the program."""
        return self.schedule not in WEIGHTS

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
    return Job(**{**content, "lengths": tuple(content["lengths"])})


def plan_of(job: Job, layers: int) -> Plan:
    """The job as a plan for a model of so many layers; its costs are not known."""
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


def program_of(job: Job, layers: int) -> Program:
    """The program that every rank runs, `job.runs` times, for a model of so many layers."""
    return with_samples(compile_plan(plan_of(job, layers), batches=job.steps), job.samples)


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
    return {0: [inputs], len(program.layout.stages) - 1: [targets]}


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
