"""Run a plan, or a program, on a model of the machines.

Prints JSON: makespan, bubble, pace and peak, and what the critical path consists of. A program without --plan
counts forward passes as 1 second, backward as 2 and each micro-batch as 1 byte. Without machines, messages
take no time.
"""

from __future__ import annotations

import argparse
from typing import Any

from pipeline.cli.common import (
    add_input_arguments,
    add_topology_arguments,
    costs_of,
    read_input,
    say,
    topology_of,
    write_json,
)
from pipeline.errors import PipelineError, TopologyError
from pipeline.plans import Plan
from pipeline.program import Program
from pipeline.simulator import Result, draw, simulate, simulate_plan, write_trace
from pipeline.topology import Topology
from pipeline.validator import check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `simulate`."""
    add_input_arguments(parser)
    add_topology_arguments(parser)
    parser.add_argument("--eager", action="store_true", help="transfers need not wait for the receiver")
    parser.add_argument(
        "--all-replicas", action="store_true", help="simulate all replicas also where one can stand for all"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev (JSON)")
    parser.add_argument("--picture", metavar="FILE", help="draw the schedule (png, svg or pdf)")
    parser.add_argument("--out", metavar="FILE", help="where the result goes (default: standard output)")


def run(args: argparse.Namespace) -> int:
    """Simulate, and write the result."""
    topology = topology_of(args)
    given = read_input(args)
    result = _plan(args, given, topology) if isinstance(given, Plan) else _program(args, given, topology)
    if args.trace is not None:
        write_trace(result, args.trace)
    if args.picture is not None:
        draw(result, args.picture)
    content = report(result)
    if topology is not None and topology.memory_bytes is not None:
        content["fits_into_memory"] = max(result.peak_bytes) <= topology.memory_bytes
    write_json(content, args.out)
    return 0


def _plan(args: argparse.Namespace, plan: Plan, topology: Topology | None) -> Result:
    used = [d for stage in plan.stages for group in stage.devices for d in group]
    if topology is not None and max(used, default=0) >= topology.devices:
        raise TopologyError(f"the plan uses device {max(used)}; there are {topology.devices}.")
    say(f"simulating {len(plan.stages)} stages, {plan.micro_batches} micro-batches")
    return simulate_plan(
        plan, topology, collapse=not args.all_replicas, rendezvous=not args.eager, batches=args.batches
    )


def _program(args: argparse.Namespace, program: Program, topology: Topology | None) -> Result:
    if topology is not None and topology.devices < len(program.ranks):
        raise TopologyError(f"{len(program.ranks)} ranks need as many devices; there are {topology.devices}.")
    problems = check(program)
    if problems:
        raise PipelineError("the program is not valid:\n" + "\n".join(map(str, problems)))
    say(f"simulating {sum(map(len, program.ranks))} actions")
    return simulate(program, costs_of(args, program), topology, rendezvous=not args.eager)


def report(result: Result) -> dict[str, Any]:
    """The result in numbers."""
    path: dict[str, float] = {}
    for event in result.critical_path:
        kind = str(event.action).split(" ", 1)[0]
        path[kind] = path.get(kind, 0.0) + event.end - event.start
    return {
        "ranks": len(result.program.ranks),
        "makespan_s": result.makespan_s,
        "bubble": result.bubble,
        "steady_s_per_micro_batch": result.steady_s,
        "busy_s": list(result.busy_s),
        "peak_bytes": list(result.peak_bytes),
        "critical_path_s": path,
    }
