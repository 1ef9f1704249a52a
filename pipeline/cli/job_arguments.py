"""Options of the commands that train."""

from __future__ import annotations

import argparse
from typing import get_args

from pipeline.cli.common import integers
from pipeline.plans import Schedule

SCHEDULES = (*get_args(Schedule), "vertical-sync")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, size and length of a job; not its schedule."""
    parser.add_argument(
        "model", help="charlm, or package.module:function, which gives a pipeline.trainable.Trainable"
    )
    parser.add_argument(
        "--stages", type=int, default=4, metavar="N", help="processes of one pipeline (default: 4)"
    )
    parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="in a batch (default: 8)")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="in a micro-batch (default: 2)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="batches (default: 10)")
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="pipelines side by side (default: 1)"
    )
    parser.add_argument("--recompute", action="store_true", help="recompute instead of keeping activations")
    parser.add_argument(
        "--layers", type=integers, default=(), metavar="N,N", help="layers of each stage (default: even)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the model; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (default: 0)")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a process waits for another (default: 60)",
    )
