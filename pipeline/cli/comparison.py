"""What `compare` does: predict and run each schedule or plan, and print both."""

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
from pipeline.cli.jobs import job_of, job_of_plan_file, run_job
from pipeline.cli.measuring import measured_costs
from pipeline.errors import PlanError
from pipeline.plans import StageCost
from pipeline.runtime.job import Job, program_of
from pipeline.simulator import simulate
from pipeline.topology import flat
from pipeline.trainable import make_trainable


def compare(args: argparse.Namespace) -> int:
    """Run the schedules or plans in turn, print a table, and write all samples."""
    if args.rounds < 1:
        raise PlanError(f"--rounds {args.rounds}: at least 1.")
    jobs = _jobs(args)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for number in range(args.rounds):
        known: dict[object, tuple[StageCost, ...]] = {}  # the same stages cost the same
        for name, job in jobs.items():
            say(f"round {number + 1} of {args.rounds}: {name}")
            cut = (job.stages, job.lengths, job.samples)
            if cut not in known:
                known[cut] = measured_costs(job)
            predicted = predict(job, known[cut], args.latency, args.bandwidth)
            rounds[name].append(predicted | run_and_time(job))
    rows = [{"name": name, "job": asdict(job)} | _summary(rounds[name]) for name, job in jobs.items()]
    _print(rows, "plan" if args.plans else "schedule")
    if args.out is not None:
        write_json(
            {"machine": machine(), "latency_s": args.latency, "bandwidth": args.bandwidth, "rows": rows},
            args.out,
        )
    return 0


def _summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds of one job, beside the rounds."""
    samples = [sample for each in rounds for sample in each["samples_s"]]
    return {
        "predicted_s": median(each["predicted_s"] for each in rounds),
        "measured_s": median(samples),
        "samples_s": samples,
        "held_bytes": rounds[0]["held_bytes"],
        "predicted_bytes": rounds[0]["predicted_bytes"],
        "rounds": list(rounds),
    }


def _print(rows: Sequence[dict[str, Any]], title: str) -> None:
    width = max(18, *(len(row["name"]) + 2 for row in rows))
    titles = f"{'predicted':>10}{'measured':>10}{'p10':>9}{'p90':>9}{'error':>8}{'most bytes':>12}"
    print(f"{title:<{width}}{titles}")
    for row in rows:
        samples, measured_s = row["samples_s"], row["measured_s"]
        low, *_, high = quantiles(samples, n=10) if len(samples) > 1 else samples * 2
        error = row["predicted_s"] / measured_s - 1
        print(
            f"{row['name']:<{width}}{row['predicted_s']:>10.4f}{measured_s:>10.4f}{low:>9.4f}{high:>9.4f}"
            f"{error:>+8.1%}{max(row['held_bytes']):>12}"
        )


def _jobs(args: argparse.Namespace) -> dict[str, Job]:
    """What to compare, by name."""
    if args.plans:
        return {path: job_of_plan_file(args, path) for path in args.plans}
    unknown = [name for name in args.schedules if name not in SCHEDULES]
    if unknown:
        raise PlanError(f"no schedule is called {', '.join(unknown)}; they are {', '.join(SCHEDULES)}.")
    return {name: job_of(args, name) for name in args.schedules}


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
        "load": list(os.getloadavg()),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
