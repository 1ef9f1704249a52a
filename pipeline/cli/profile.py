"""Measure the layers of a model on this machine, for `plan`.

    python -m pipeline profile charlm --samples 2 --out profile.json
    python -m pipeline plan --profile profile.json --machines 4 --bandwidth 1e9 --out plan.json
    python -m pipeline run charlm --plan plan.json

Each layer is a node, the loss belongs to the last one. Seconds are the median of some passes with one thread.
"""

from __future__ import annotations

import argparse

from pipeline.cli.common import say, write_json
from pipeline.cli.job_arguments import add_model_arguments
from pipeline.errors import PlanError
from pipeline.profiles import profile_to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `profile`."""
    add_model_arguments(parser)
    parser.add_argument(
        "--samples", type=int, default=2, metavar="N", help="in a micro-batch (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="FILE", help="where the profile goes (default: standard output)")


def run(args: argparse.Namespace) -> int:
    """Measure, and write the profile."""
    # torch takes seconds to load, and the other commands do without it.
    from pipeline.cli.jobs import model_options
    from pipeline.cli.measuring import measured_profile
    from pipeline.runtime.job import Job

    if args.samples < 1:
        raise PlanError(f"--samples {args.samples}: at least 1.")
    say(f"measuring {args.model}")
    job = Job(args.model, samples=args.samples, options=model_options(args.set), seed=args.seed)
    graph = measured_profile(job)
    write_json({graph.model.name: profile_to_json(graph)}, args.out)
    return 0
