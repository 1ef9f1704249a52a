"""Run several schedules or plans of one model on this machine: measured beside predicted.

    python -m pipeline compare sleep --schedules gpipe,1f1b,bpipe,zb-h1
    python -m pipeline compare charlm --plans even.json,planned.json

Stages are measured one by one first; the simulator predicts from that how long a step takes when every
process has a core of its own, and the larger of that and all work divided by the cores is the prediction.
The model `sleep` needs no cores, so that it shows what a schedule does and not what the machine lacks.
"""

from __future__ import annotations

import argparse

from pipeline.cli.job_arguments import SCHEDULES, add_job_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    add_job_arguments(parser)
    parser.add_argument(
        "--schedules",
        type=lambda text: tuple(text.split(",")),
        default=("gpipe", "1f1b", "bpipe", "zb-h1"),
        metavar="NAME,NAME",
        help=f"of {', '.join(SCHEDULES)} (default: gpipe,1f1b,bpipe,zb-h1)",
    )
    parser.add_argument(
        "--plans",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="FILE,FILE",
        help="plans to compare, instead of schedules",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="times that all are measured and run, in turn; medians count (default: %(default)s)",
    )
    parser.add_argument(
        "--latency", type=float, default=0.0, metavar="S", help="seconds that a message takes (default: 0)"
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=1e9,
        metavar="B",
        help="bytes per second between processes (default: 1e9)",
    )
    parser.add_argument("--out", metavar="FILE", help="all samples as JSON")


def run(args: argparse.Namespace) -> int:
    """Run, and print a table."""
    # torch takes seconds to load, and the other commands do without it.
    from pipeline.cli.comparison import compare

    return compare(args)
