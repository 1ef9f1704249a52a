"""Options and output that commands share."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipeline.compile import stage_costs
from pipeline.errors import PipelineError, TopologyError
from pipeline.plans import Plan, StageCost, plan_from_json, read_plan
from pipeline.program import Program, parse_program
from pipeline.topology import Level, Topology, read_topology

UNIT = StageCost(1.0, 2.0, saved_bytes=1.0, input_bytes=1.0)
"""Costs of a stage about which nothing is known: forward 1 second, backward 2, a micro-batch counts 1."""


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(int(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them, such as 10e9,1.25e9."""
    return tuple(float(part) for part in text.split(","))


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that describe the machines."""
    group = parser.add_argument_group("machines")
    group.add_argument("--topology", metavar="FILE", help="topology as JSON, instead of the options below")
    group.add_argument(
        "--machines",
        type=integers,
        metavar="N,N",
        help="how many components each level joins, innermost level first: 4,2 is 2 servers of 4 devices",
    )
    group.add_argument(
        "--bandwidth",
        type=numbers,
        metavar="B,B",
        help="bytes per second of a link of each level, innermost level first",
    )
    group.add_argument(
        "--latency",
        type=numbers,
        metavar="S,S",
        help="seconds that a message takes on top of its bytes, at each level (default: 0)",
    )
    group.add_argument(
        "--memory", type=float, metavar="BYTES", help="memory of a device (default: unlimited)"
    )


def topology_of(args: argparse.Namespace) -> Topology | None:
    """The topology that the options describe; None when they say nothing.

    Raises:
        TopologyError: They are incomplete or contradict each other.
    """
    if args.topology is not None:
        if args.machines or args.bandwidth or args.latency or args.memory:
            raise TopologyError(
                "--topology says it all; leave out --machines, --bandwidth, --latency and --memory."
            )
        return read_topology(args.topology)
    if args.machines is None and args.bandwidth is None:
        if args.latency or args.memory:
            raise TopologyError("--latency and --memory need machines: give --machines and --bandwidth too.")
        return None
    if args.machines is None or args.bandwidth is None or len(args.machines) != len(args.bandwidth):
        raise TopologyError("--machines and --bandwidth go together, with as many numbers: one a level.")
    latency = args.latency or (0.0,) * len(args.machines)
    if len(latency) != len(args.machines):
        raise TopologyError(f"--latency has {len(latency)} numbers for {len(args.machines)} levels.")
    levels = (Level(*level) for level in zip(args.machines, args.bandwidth, latency, strict=True))
    return Topology(tuple(levels), args.memory)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """The file that a command works on."""
    parser.add_argument("input", metavar="FILE", help="a plan (JSON) or a program (text)")
    parser.add_argument(
        "--plan", metavar="FILE", help="for a program: the plan that has the costs of its stages"
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=4,
        metavar="N",
        help="for a 2BW plan: batches to run (default: %(default)s)",
    )


def read_input(args: argparse.Namespace) -> Plan | Program:
    """The plan or the program that a command works on.

    Raises:
        PipelineError: The file can't be read.
    """
    try:
        text = Path(args.input).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read {args.input}: {error}.") from error
    if not text.lstrip().startswith("{"):
        return parse_program(text)
    try:
        return plan_from_json(json.loads(text))
    except json.JSONDecodeError as error:
        raise PipelineError(f"{args.input} is not JSON: {error}.") from error


def costs_of(args: argparse.Namespace, program: Program) -> tuple[StageCost, ...]:
    """The costs of a program's stages: those of `--plan`, or units.

    Raises:
        PipelineError: Plan and program don't go together.
    """
    if args.plan is None:
        return (UNIT,) * len(program.layout.stages)
    costs = stage_costs(read_plan(args.plan))
    if len(costs) != len(program.layout.stages):
        raise PipelineError(
            f"{args.plan} has {len(costs)} stages and {args.input} has {len(program.layout.stages)}."
        )
    return costs


def write_json(content: Any, path: str | None) -> None:
    """Write JSON to a file, or to standard output."""
    text = json.dumps(content, indent=2) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def say(text: str) -> None:
    """Tell whoever watches a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr)
