"""From options to a job, and running it."""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.errors import PlanError
from pipeline.program import Program
from pipeline.runtime.errors import RunError
from pipeline.runtime.job import Job, program_of
from pipeline.runtime.launch import launch
from pipeline.runtime.progress import read_progress
from pipeline.trainable import make_trainable


def job_of(args: argparse.Namespace, schedule: str) -> Job:
    """The job that options describe."""
    options = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--set {text}: give NAME=VALUE.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    job = Job(
        args.model,
        args.stages,
        schedule,
        args.micro_batches,
        args.samples,
        args.steps,
        args.replicas,
        args.chunks if "interleaved" in schedule else 1,
        args.recompute,
        args.layers,
        options,
        args.seed,
        args.limit,
    )
    for name in ("ranks", "micro_batches", "samples", "steps", "replicas", "chunks"):
        if getattr(job, name) < 1:
            raise PlanError(f"{name} is {getattr(job, name)}; it must be at least 1.")
    return job


def run_job(job: Job, *, checkpoints: str | None = None, every: int = 1) -> list[dict[str, Any]]:
    """Run a job on processes of this machine.

    Returns:
        What each rank reports; see `pipeline.runtime.worker`.

    Raises:
        RunError: Some rank failed: what each one says, or where it was.
    """
    program = program_of(job, len(make_trainable(job.model, job.seed, **job.options).layers))
    ranks = program.layout.ranks
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
            reports.append(f"  rank {r} ended without a word in run {run}, at {where}; it was killed.")
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
