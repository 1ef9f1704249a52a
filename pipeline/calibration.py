"""How well the simulator predicts real processes: `python -m pipeline.calibration --out FILE`.

Runs stages that sleep under many schedules. What a message costs on top of its bytes is fitted to the first
configuration, then frozen; the signed errors of all others follow from it. Takes some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.cli.common import say, write_json
from pipeline.cli.comparison import machine, predict, run_and_time
from pipeline.cli.measuring import measured_costs
from pipeline.plans import StageCost
from pipeline.runtime.job import Job

BANDWIDTH = 1e9
"""Bytes per second between processes of one host; messages here are too small for it to matter."""


def configuration(schedule: str, ranks: int, micro_batches: int, sample_bytes: int, **more: Any) -> Job:
    """A job of stages that sleep 20 ms forward and 40 ms backward, or as `options` says."""
    layers = ranks * (2 if schedule in ("zbv", "interleaved", "bpipe-interleaved") else 1)
    flushes = schedule not in ("pipedream", "vertical-sync", "2bw")
    return Job(
        "sleep",
        ranks=ranks,
        schedule=schedule,
        micro_batches=micro_batches,
        samples=1,
        steps=6 if flushes else 4,
        chunks=2 if "interleaved" in schedule else 1,
        options={"layers": layers, "sample_bytes": sample_bytes, **more},
    )


CONFIGURATIONS = (
    configuration("1f1b", 4, 8, 1024),
    configuration("1f1b", 4, 8, 65536),
    configuration("1f1b", 2, 4, 1024),
    configuration("1f1b", 4, 16, 16384, forward_ms=10.0, backward_ms=20.0),
    configuration("gpipe", 4, 8, 1024),
    configuration("gpipe", 3, 6, 65536, forward_ms=30.0, backward_ms=45.0),
    configuration("bpipe", 4, 8, 16384),
    configuration("interleaved", 2, 8, 1024),
    configuration("interleaved", 4, 8, 16384),
    configuration("bpipe-interleaved", 4, 8, 1024),
    configuration("zb-h1", 4, 8, 1024),
    configuration("zbv", 2, 8, 65536),
    configuration("pipedream", 4, 8, 1024),
    configuration("2bw", 4, 8, 16384),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all configurations, print the errors, and write everything."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.calibration", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="all samples as JSON")
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    latency = 0.0
    print("schedule             ranks  micro-batches   bytes  predicted  measured   error")
    for job in CONFIGURATIONS:
        say(f"running {job.schedule} on {job.ranks} ranks")
        timed = run_and_time(job)
        if not job.flushes:  # one run does it all
            timed |= {"measured_s": timed["first_s"]}
        costs = measured_costs(job)
        if not rows:
            latency = fit(job, costs, timed["measured_s"])
            print(f"a message takes {1e3 * latency:.2f} ms besides its bytes, fitted to the first line")
        predicted = predict(job, costs, latency, BANDWIDTH)
        error = predicted["predicted_s"] / timed["measured_s"] - 1
        rows.append({"job": asdict(job), "error": error} | predicted | timed)
        print(
            f"{job.schedule:<20}{job.ranks:>6}{job.micro_batches:>15}{job.options['sample_bytes']:>8}"
            f"{predicted['predicted_s']:>11.4f}{timed['measured_s']:>10.4f}{error:>+8.1%}",
            flush=True,
        )
    if args.out is not None:
        write_json(
            {"machine": machine(), "latency_s": latency, "bandwidth": BANDWIDTH, "rows": rows}, args.out
        )
    return 0


def fit(job: Job, costs: Sequence[StageCost], measured_s: float, *, most_s: float = 0.02) -> float:
    """The latency, in seconds and up to `most_s`, at which what is predicted equals what was measured."""
    low, high = 0.0, most_s
    for _ in range(12):
        middle = (low + high) / 2
        if predict(job, costs, middle, BANDWIDTH)["predicted_s"] < measured_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


if __name__ == "__main__":
    raise SystemExit(main())
