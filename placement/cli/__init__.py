"""Find the fastest backend for each part of a model.

    python -m placement backends
    python -m placement optimize models.py:make_resnet --budget 120 --save resnet.pt2 --draw resnet.svg
    python -m placement log --backend onnxruntime
    python -m placement log --prune --older-than 30

Times are seconds, unless a column says ms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from placement.cli import backends, log, optimize
from placement.errors import PlacementError


class Command(Protocol):
    """A module with a command: its docstring is the help text."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and give the exit status."""


COMMANDS: dict[str, Command] = {"backends": backends, "optimize": optimize, "log": log}
"""The commands by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when all is well, 2 when the input can't be used."""
    parser = argparse.ArgumentParser(
        prog="python -m placement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    except PlacementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
