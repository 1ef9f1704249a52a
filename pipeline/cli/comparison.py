"""What `compare` does: predict and run each schedule, and print both."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

import torch

from pipeline.cli.common import say, write_json
from pipeline.cli.job_arguments import SCHEDULES
from pipeline.cli.jobs import job_of, run_job
from pipeline.errors import PlanError
from pipeline.plans import StageCost
from pipeline.runtime.job import Job, data_of, program_of, stage_modules
from pipeline.runtime.measure import measure
from pipeline.simulator import simulate
from pipeline.topology import flat
from pipeline.trainable import make_trainable


def compare(args: argparse.Namespace) -> int:
    """Run the schedules, print a table, and write all samples."""
    unknown = [name for name in args.schedules if name not in SCHEDULES]
    if unknown:
        raise PlanError(f"no schedule is called {', '.join(unknown)}; they are {', '.join(SCHEDULES)}.")
    rows = []
    known: dict[int, tuple[StageCost, ...]] = {}  # by number of stages: the same ones cost the same
    print(
        f"{'schedule':<18}{'predicted':>10}{'measured':>10}{'p10':>9}{'p90':>9}{'error':>8}{'most bytes':>12}"
    )
    for schedule in args.schedules:
        say(f"running {schedule}")
        job = job_of(args, schedule)
        if job.stages not in known:
            known[job.stages] = measured_costs(job)
        predicted = predict(job, known[job.stages], args.latency, args.bandwidth)
        row = {"job": asdict(job)} | predicted | run_and_time(job)
        rows.append(row)
        low, *_, high = (
            quantiles(row["samples_s"], n=10) if len(row["samples_s"]) > 1 else row["samples_s"] * 2
        )
        error = row["predicted_s"] / row["measured_s"] - 1
        print(
            f"{schedule:<18}{row['predicted_s']:>10.4f}{row['measured_s']:>10.4f}{low:>9.4f}{high:>9.4f}"
            f"{error:>+8.1%}{max(row['held_bytes']):>12}"
        )
    if args.out is not None:
        write_json(
            {"machine": machine(), "latency_s": args.latency, "bandwidth": args.bandwidth, "rows": rows},
            args.out,
        )
    return 0


def measured_costs(job: Job) -> tuple[StageCost, ...]:
    """What the stages of a job cost, each alone in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks
    try:
        trainable = make_trainable(job.model, job.seed, **job.options)
        program = program_of(job, len(trainable.layers))
        modules = stage_modules(job, trainable, range(len(program.layout.stages)))
        data = data_of(job, trainable, program, 0)
        return measure(program.layout, [modules[s] for s in sorted(modules)], data)
    finally:
        torch.set_num_threads(before)


def predict(job: Job, costs: Sequence[StageCost], latency_s: float, bandwidth: float) -> dict[str, Any]:
    """What the simulator says about one run of a job's program."""
    program = program_of(
        job, sum(job.lengths) or len(make_trainable(job.model, job.seed, **job.options).layers)
    )
    result = simulate(program, costs, flat(program.layout.ranks, bandwidth, latency_s=latency_s))
    cores = len(os.sched_getaffinity(0))
    by_cores = 0.0 if job.model == "sleep" else sum(result.busy_s) / cores
    return {
        "costs": [asdict(cost) for cost in costs],
        "simulated_s": result.makespan_s,
        "by_cores_s": by_cores,
        "predicted_s": max(result.makespan_s, by_cores),
        "bubble": result.bubble,
        "predicted_bytes": list(result.peak_bytes),
    }


def run_and_time(job: Job) -> dict[str, Any]:
    """Seconds of each run of a job's program, the first one apart, and the most bytes that each rank held."""
    results = run_job(job)
    seconds = [max(times) for times in zip(*(result["seconds"] for result in results), strict=True)]
    samples = seconds[1:] or seconds  # the first run also finds out shapes
    return {
        "first_s": seconds[0],
        "samples_s": samples,
        "measured_s": median(samples),
        "held_bytes": [result["held_bytes"] for result in results],
    }


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
