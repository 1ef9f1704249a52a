"""Train a model in a pipeline of processes on this machine, and compare with one process.

    python -m pipeline run charlm --stages 4 --schedule bpipe
    python -m pipeline run charlm --plan plan.json

Cut and schedule come from options, or from a plan, whose nodes are the model's layers in their order; its
devices and times don't matter here. Starts torchrun itself. The same training is then done in this process,
without a pipeline, and losses are compared bit by bit; with replicas, whose gradients are added in another
order, up to rounding. A schedule that never flushes is compared with the same delayed weights. Exit status 1
when losses differ, 2 when the input can't be used or a process failed.
"""

from __future__ import annotations

import argparse

from pipeline.cli.job_arguments import SCHEDULES, add_job_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run`."""
    add_job_arguments(parser)
    parser.add_argument("--schedule", choices=SCHEDULES, help="default: 1f1b")
    parser.add_argument(
        "--plan", metavar="FILE", help="run this plan (JSON), instead of the options that say the same"
    )
    parser.add_argument("--no-reference", action="store_true", help="do not train in one process as well")
    parser.add_argument(
        "--checkpoints", metavar="DIR", help="write a checkpoint after each step, and go on from the last one"
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="steps between checkpoints (default: 1)"
    )
    parser.add_argument("--out", metavar="FILE", help="losses, seconds and bytes as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, compare, and print."""
    # torch takes seconds to load, and the other commands do without it.
    from pipeline.cli.training import train

    return train(args)
