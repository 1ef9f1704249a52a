"""The command line: chooses the command and hands it its arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from bench.commands import (
    cases,
    compare,
    coverage,
    demo,
    list_programs,
    overlap,
    placement,
    profile,
    report,
    speed,
    train,
)

COMMANDS: dict[str, ModuleType] = {
    "list": list_programs,
    "train": train,
    "compare": compare,
    "overlap": overlap,
    "cases": cases,
    "coverage": coverage,
    "placement": placement,
    "speed": speed,
    "profile": profile,
    "report": report,
    "demo": demo,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="python -m bench",
        description="Trains the program suite in eager, torch.compile and co-execution, and compares them.",
        epilog="Times are in milliseconds (ms) or seconds (s), memory is in MB (10^6 bytes).",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        description = (module.__doc__ or "").strip()
        first_line = description.splitlines()[0].rstrip(".")
        command = commands.add_parser(
            name,
            help=first_line,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    options.given = given
    if "threads" in options:
        torch.set_num_threads(options.threads)
    status: int = COMMANDS[options.command].run(options)
    return status
