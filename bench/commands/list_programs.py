"""List the programs of the suite."""

from __future__ import annotations

import argparse

from bench.options import say
from bench.programs import PROGRAMS
from bench.tables import plain_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(options: argparse.Namespace) -> int:
    """Print one line a program."""
    rows = [(program.name, program.metric, program.description) for program in PROGRAMS.values()]
    say(plain_table(("program", "metric", "description"), rows))
    return 0
