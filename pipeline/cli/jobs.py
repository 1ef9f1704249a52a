"""From options to a job, and running it."""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.cli.job_arguments import SHAPE
from pipeline.errors import PlanError
from pipeline.plans import read_plan
from pipeline.program import Program
from pipeline.runtime.errors import RunError
from pipeline.runtime.job import Job, job_of_plan, program_of
from pipeline.runtime.launch import launch
from pipeline.runtime.progress import read_progress
from pipeline.trainable import make_trainable

MOST_PROCESSES = 64
"""Processes that one machine may be asked to run; a plan for a cluster has many more."""


def job_of(args: argparse.Namespace, schedule: str | None = None) -> Job:
    """The job that options describe.

    Args:
        args: The options.
        schedule: A schedule, when they name none.

    Raises:
        PlanError: An option is out of range, or contradicts the plan.
    """
    if getattr(args, "plan", None) is not None:
        return job_of_plan_file(args, args.plan)
    values = {name: getattr(args, name, None) for name in SHAPE}
    shape = {name: SHAPE[name] if value is None else value for name, value in values.items()}
    if schedule is None:
        schedule = str(shape["schedule"])
        if values["chunks"] is not None and "interleaved" not in schedule:
            raise PlanError(
                f"--chunks goes with an interleaved schedule; {schedule} has one stage a process."
            )
    job = Job(
        args.model,
        shape["stages"],
        schedule,
        shape["micro_batches"],
        shape["samples"],
        args.steps,
        shape["replicas"],
        shape["chunks"] if "interleaved" in schedule else 1,
        shape["recompute"],
        shape["layers"],
        model_options(args.set),
        args.seed,
        args.limit,
    )
    for name in ("ranks", "micro_batches", "samples", "steps", "replicas", "chunks"):
        if getattr(job, name) < 1:
            option = "stages" if name == "ranks" else name.replace("_", "-")
            raise PlanError(f"--{option} {getattr(job, name)}: at least 1.")
    return job


def job_of_plan_file(args: argparse.Namespace, path: str) -> Job:
    """The job that a plan describes, with what the options say besides.

    Raises:
        PlanError: The plan can't be read or run, or options say again what it says.
    """
    given = [f"--{name.replace('_', '-')}" for name in SHAPE if getattr(args, name, None) is not None]
    if given:
        raise PlanError(f"{path} says how to cut and schedule; leave out {', '.join(given)}.")
    if args.steps < 1:
        raise PlanError(f"--steps {args.steps}: at least 1.")
    plan = read_plan(path)
    options = model_options(args.set)
    return job_of_plan(
        args.model, plan, steps=args.steps, options=options, seed=args.seed, limit_s=args.limit
    )


def model_options(texts: Sequence[str]) -> dict[str, Any]:
    """The options of a model from `NAME=VALUE`; a value that is no Python literal is text."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--set {text}: give NAME=VALUE.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def run_job(job: Job, *, checkpoints: str | None = None, every: int = 1) -> list[dict[str, Any]]:
    """Run a job on processes of this machine.

    Returns:
        What each rank reports; see `pipeline.runtime.worker`.

    Raises:
        PlanError: Model and stages don't go together, or there are too many of them.
        RunError: Some rank failed: what each one says, or where it was.
    """
    program = program_of(job, len(make_trainable(job.model, job.seed, **job.options).layers))
    ranks = program.layout.ranks
    if ranks > MOST_PROCESSES:
        raise PlanError(
            f"{ranks} processes are needed, one for each replica of a stage; one machine gets at most"
            f" {MOST_PROCESSES}. Plan for fewer devices."
        )
    with tempfile.TemporaryDirectory(prefix="pipeline-") as name:
        directory = Path(name)
        content = {"job": asdict(job), "checkpoints": checkpoints, "every": every}
        (directory / "job.json").write_text(json.dumps(content), encoding="utf-8")
        bar = _Bar(directory, program, job.runs)
        status = launch("pipeline.runtime.worker", [name], ranks, directory, watch=bar.show)
        bar.clear()
        results = [directory / f"rank-{r}.json" for r in range(ranks)]
        if status == 0 and all(path.exists() for path in results):
            return [json.loads(path.read_text(encoding="utf-8")) for path in results]
        raise RunError(
            f"{job.schedule} on {ranks} processes failed.\n" + "\n".join(_reports(directory, program))
        )


def mean_losses(job: Job, program: Program, losses: Mapping[tuple[int, int], float]) -> list[float]:
    """The mean loss of each batch, from losses by run and micro-batch."""
    each = program.layout.micro_batches(len(program.layout.stages) - 1) * job.runs // job.steps
    ordered = [losses[key] for key in sorted(losses)]
    return [sum(ordered[i : i + each]) / each for i in range(0, len(ordered), each)]


def _reports(directory: Path, program: Program) -> list[str]:
    """What each rank that did not end well says; where it was, if it says nothing."""
    reports = []
    for r, actions in enumerate(program.ranks):
        error = directory / f"rank-{r}.error"
        if error.exists():
            reports.append(f"  {error.read_text(encoding='utf-8')}")
        elif not (directory / f"rank-{r}.json").exists():
            run, index = read_progress(directory / f"rank-{r}.progress")
            where = f"index {index} ({actions[index]})" if 0 <= index < len(actions) else "its start"
            why = "it was killed" if index >= 0 else "it was killed, or could not start: see above"
            reports.append(f"  rank {r} ended without a word in run {run}, at {where}; {why}.")
    return reports


class _Bar:
    """How far the first rank is, for whoever watches a terminal."""

    def __init__(self, directory: Path, program: Program, runs: int) -> None:
        self._path = directory / "rank-0.progress"
        self._total = len(program.ranks[0]) * runs
        self._each = len(program.ranks[0])

    def show(self) -> None:
        if sys.stderr.isatty():
            run, index = read_progress(self._path)
            done = min(run * self._each + index + 1, self._total)
            print(f"\r{done} of {self._total} actions ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
