"""Check a plan's program, or a program, before anything runs it.

Each problem is a line that names rank, index and reason. Exit status 1 when there are any.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.common import add_input_arguments, costs_of, read_input, say
from pipeline.compile import compile_plan, stage_costs
from pipeline.memory import peaks
from pipeline.plans import Plan
from pipeline.torch_text import write_csv
from pipeline.validator import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `validate`."""
    add_input_arguments(parser)
    parser.add_argument(
        "--matching",
        choices=["tags", "fifo"],
        default="fifo",
        help="how messages find each other: by tag (gloo) or in order (NCCL) (default: %(default)s)",
    )
    parser.add_argument(
        "--memory", type=float, metavar="BYTES", help="what a rank may hold (default: unlimited)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the program as text to a file")
    parser.add_argument(
        "--torch",
        metavar="FILE",
        help="write it for torch.distributed.pipelining (CSV), if that can express it",
    )


def run(args: argparse.Namespace) -> int:
    """Check, and print what is wrong."""
    given = read_input(args)
    if isinstance(given, Plan):
        say(f"compiling {len(given.stages)} stages, {given.micro_batches} micro-batches")
        program, costs = compile_plan(given, batches=args.batches), stage_costs(given)
    else:
        program, costs = given, costs_of(args, given)
    if args.out is not None:
        Path(args.out).write_text(str(program), encoding="utf-8")
    if args.torch is not None:
        write_csv(program, args.torch)
    actions = sum(map(len, program.ranks))
    say(f"checking {actions} actions")
    problems = check(program, costs=costs, memory_bytes=args.memory, matching=args.matching)
    for problem in problems:
        print(problem)
    if not problems:
        peak = max(peaks(program, costs))
        print(f"valid: {len(program.ranks)} ranks, {actions} actions, peak {peak:.0f} bytes on a rank")
    return 1 if problems else 0
