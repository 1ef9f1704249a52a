"""What `run` does: train in processes and in one process, and compare."""

from __future__ import annotations

import argparse
import math

from pipeline.cli.common import say, write_json
from pipeline.cli.jobs import job_of, mean_losses, run_job
from pipeline.cli.measuring import one_thread
from pipeline.errors import PlanError
from pipeline.runtime.job import Job, data_of, program_of, stage_modules
from pipeline.runtime.reference import run_in_one_process
from pipeline.trainable import make_trainable

ROUNDING = 1e-4
"""Relative difference of losses that another order of addition in 32 bits may make over some steps."""

Losses = dict[tuple[int, int], float]
"""By run and micro-batch."""


def train(args: argparse.Namespace) -> int:
    """Train, compare, and print."""
    job = job_of(args)
    if args.every < 1:
        raise PlanError(f"--every {args.every}: at least 1.")
    say(f"training {job.model}, schedule {job.schedule}")
    results = run_job(job, checkpoints=args.checkpoints, every=args.every)
    first = results[0]["first"]
    found = {
        (first + run, k): loss
        for result in results
        for run, losses in enumerate(result["losses"])
        for k, loss in losses
    }
    program = program_of(job, len(make_trainable(job.model, job.seed, **job.options).layers))
    expected: Losses = {}
    if not args.no_reference:
        say("training in one process")
        expected = reference_losses(job)
    means = mean_losses(job, program, {**expected, **found})
    before = 0 if expected else first  # steps of an earlier job, whose losses are not known
    same = all(found[key] == expected[key] for key in found) if expected else None
    worst = max((_difference(found[key], expected[key]) for key in found), default=0.0) if expected else None
    verdict = _verdict(len(found), same, worst, job.same_order)
    if args.out is not None:
        write_json({"ranks": results, "difference": worst}, args.out)
    for step, loss in enumerate(means, before):
        print(f"step {step:4d}  loss {loss:.6f}")
    seconds = sorted(max(times) for times in zip(*(result["seconds"] for result in results), strict=True))
    if seconds:
        print(f"median {seconds[len(seconds) // 2]:.4f} s a {'step' if job.flushes else 'window'}")
    print("most bytes held, by process: " + ", ".join(str(result["held_bytes"]) for result in results))
    print(verdict)
    return 0 if worst is None or same or (not job.same_order and worst <= ROUNDING) else 1


def reference_losses(job: Job) -> Losses:
    """The losses of the same training in this process."""
    with one_thread():
        trainable = make_trainable(job.model, job.seed, **job.options)
        program = program_of(job, len(trainable.layers))
        modules = stage_modules(job, trainable, range(len(program.layout.stages)))
        stages = [modules[s] for s in sorted(modules)]
        losses: Losses = {}
        for number in range(job.runs):
            data = data_of(job, trainable, program, number)
            found = run_in_one_process(program, stages, data, seed=job.seed, run=number)
            losses |= {(number, k): loss.item() for (_, k), loss in found.items()}
        return losses


def _difference(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _verdict(count: int, same: bool | None, worst: float | None, same_order: bool) -> str:
    if worst is None:
        return "not compared with one process."
    if same:
        return f"losses equal the single-process run: all {count}, bit for bit."
    if not same_order and worst <= ROUNDING:
        return (
            f"losses equal the single-process run up to rounding: of {count}, the largest relative difference"
            f" is {worst:.1e}."
        )
    return f"losses DIFFER from the single-process run: the largest relative difference is {worst:.1e}."
