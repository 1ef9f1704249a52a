"""Options of the commands that train."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from pipeline.cli.common import integers
from pipeline.plans import Schedule

SCHEDULES = (*get_args(Schedule), "vertical-sync")

SHAPE: dict[str, Any] = {
    "schedule": "1f1b",
    "stages": 4,
    "micro_batches": 8,
    "samples": 2,
    "replicas": 1,
    "chunks": 2,
    "recompute": False,
    "layers": (),
}
"""Options that say how a model is cut and scheduled, which a plan says too, with their defaults."""


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, size and length of a job; not its schedule. Those of `SHAPE` are None when not given."""
    add_model_arguments(parser)
    parser.add_argument("--stages", type=int, metavar="N", help="processes of one pipeline (default: 4)")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="in a batch (default: 8)")
    parser.add_argument("--samples", type=int, metavar="N", help="in a micro-batch (default: 2)")
    parser.add_argument("--replicas", type=int, metavar="N", help="pipelines side by side (default: 1)")
    parser.add_argument("--chunks", type=int, metavar="V", help="interleaved: stages a process (default: 2)")
    parser.add_argument(
        "--recompute", action="store_true", default=None, help="recompute instead of keeping activations"
    )
    parser.add_argument("--layers", type=integers, metavar="N,N", help="layers of each stage (default: even)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="batches (default: 10)")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a process waits for another (default: 60)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument(
        "model", help="charlm, sleep, or package.module:function, which gives a pipeline.trainable.Trainable"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the model; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (default: 0)")
