"""Command-line options that several commands share, checked where they are read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from bench.modes import EXECUTORS, MODES, Mode
from bench.program import PRESETS, missing_packages
from bench.programs import PROGRAMS


def add_program(parser: argparse.ArgumentParser, *, record: bool = True) -> None:
    """Add the program's name and what every run of one needs."""
    parser.add_argument(
        "program", type=program_name, choices=sorted(PROGRAMS), help="what to train (python -m bench list)"
    )
    add_run(parser, record=record)


def add_run(parser: argparse.ArgumentParser, *, record: bool = True) -> None:
    """Add what every run needs; with `record`, where to write its record."""
    add_executor(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="of model, data order and dropout (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=whole(1),
        default=torch.get_num_threads(),
        help="kernel threads (default: torch's choice, here %(default)s)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="size of the program (default: %(default)s)"
    )
    if record:
        add_out(parser)


def add_executor(parser: argparse.ArgumentParser) -> None:
    """Add what runs the graph."""
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="aten",
        help="what runs the blocks of the graph (default: %(default)s)",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add where the record is written."""
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the record here (default: nowhere)"
    )


def add_timeout(parser: argparse.ArgumentParser, what: str) -> None:
    """Add how long each of the things that run in processes of their own may take."""
    parser.add_argument(
        "--timeout",
        type=whole(1),
        default=300,
        metavar="S",
        help=f"seconds after which a {what} counts as failed (default: %(default)s)",
    )


def program_name(text: str) -> str:
    """Parse a program's name, and refuse one that lacks a package; names that don't exist are not refused."""
    if text in PROGRAMS and (missing := missing_packages(PROGRAMS[text])):
        raise argparse.ArgumentTypeError(
            f"{text} needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    return text


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are not below `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def seconds(text: str) -> float:
    """Parse a time that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def modes(text: str) -> tuple[Mode, ...]:
    """Parse modes that are separated by commas; eager is added, because all else is compared with it."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MODES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a mode; choose from {','.join(MODES)}")
    return tuple(mode for mode in MODES if mode == "eager" or mode in names)


def progress(steps: Iterable[int], label: str) -> Iterable[int]:
    """Show a bar on stderr when that is a terminal."""
    bar: Iterable[int] = tqdm(steps, desc=label, unit="step", file=sys.stderr, disable=None, leave=False)
    return bar


def say(text: str = "") -> None:
    """Print a line of the result, at once even into a pipe."""
    print(text, flush=True)
