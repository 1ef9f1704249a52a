"""Plan, check, simulate and run pipeline-parallel training.

    python -m pipeline profile charlm --out charlm.json
    python -m pipeline plan --profile vgg16.json --machines 4,4 --bandwidth 10e9,1.25e9 --out plan.json
    python -m pipeline validate plan.json
    python -m pipeline simulate plan.json --machines 4,4 --bandwidth 10e9,1.25e9 --picture schedule.png
    python -m pipeline run charlm --stages 4 --schedule bpipe
    python -m pipeline compare charlm --schedules gpipe,1f1b

Times are seconds, sizes bytes, bandwidths bytes per second, unless an option says otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from pipeline.cli import compare, plan, profile, run, simulate, validate
from pipeline.errors import PipelineError


class Command(Protocol):
    """A module with a command: its docstring is the help text."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and give the exit status."""


COMMANDS: dict[str, Command] = {
    "profile": profile,
    "plan": plan,
    "validate": validate,
    "simulate": simulate,
    "run": run,
    "compare": compare,
}
"""The commands by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when all is well, 1 when a program is wrong, 2 when the input can't be used."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    parsed = parser.parse_args(arguments)
    try:
        return COMMANDS[parsed.command].run(parsed)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
