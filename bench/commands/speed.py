"""Measure how fast programs train in each mode, against eager and torch.compile.

Each program and mode has a process of its own, in which it warms up. Then the modes of a program take
turns: in every round each takes the same steps, in an order that rotates. Speeds are eager's median over a
mode's, of the rounds' mean step times: above 1 is faster than eager. torch.compile is applied to the models
and to the optimizers' steps. `coexec:asynchronous` leaves blocks without waiting. Whether results equal
eager's is what `compare` and `coverage` say.

Compilers keep their work on disk: `--prepare` compiles everything and measures nothing, with which a second
run fits its budget. What is not ready in time, or fails, has its error in the record.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.modes import EXECUTORS, Executor
from bench.options import program_name, say, seconds, whole
from bench.program import PRESETS, missing_packages
from bench.programs import PROGRAMS
from bench.records import Result, record, write_record
from bench.speed.contenders import SPEED_MODES, Contender, Setup, SpeedMode, contenders
from bench.speed.rounds import Plan, measure, prepare
from bench.speed.summary import DETAILS, conclusions, detail_rows, speed_rows, title
from bench.tables import plain_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--programs",
        type=programs,
        default=tuple(name for name, program in PROGRAMS.items() if not missing_packages(program)),
        help="which to run, separated by commas (default: all whose packages are installed)",
    )
    parser.add_argument(
        "--modes",
        type=modes,
        default=",".join(SPEED_MODES),
        help="which to run, separated by commas; eager always runs (default: %(default)s)",
    )
    parser.add_argument(
        "--executors",
        type=executors,
        default=",".join(EXECUTORS),
        help="what runs the graph in coexec and lazy, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="size of the programs (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of models, data order and dropout (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=whole(1),
        default=torch.get_num_threads(),
        help="kernel threads of each process (default: torch's choice, here %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=whole(1),
        default=720,
        metavar="S",
        help="seconds for everything, shared by the programs (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup",
        type=whole(1),
        default=15,
        help="training steps of each mode before its rounds (default: %(default)s)",
    )
    parser.add_argument(
        "--round-steps",
        type=whole(1),
        default=10,
        help="training steps of each mode in a round, at least (default: %(default)s)",
    )
    parser.add_argument(
        "--round-seconds",
        type=seconds,
        default=0.25,
        metavar="S",
        help="that eager takes for a round, at least (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=whole(1),
        default=20,
        help="rounds; fewer, but 3 at least, when the time is up (default: %(default)s)",
    )
    parser.add_argument(
        "--amp", action="store_true", help="forward passes in bfloat16 where torch.autocast does so"
    )
    parser.add_argument(
        "--channels-last", action="store_true", help="models in the memory format channels_last"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="only compile, so that it is on disk; measure nothing"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the record here (default: nowhere)"
    )


def programs(text: str) -> tuple[str, ...]:
    """Parse names of programs that are separated by commas."""
    names = tuple(program_name(name.strip()) for name in text.split(","))
    for name in names:
        if name not in PROGRAMS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a program; choose from {','.join(PROGRAMS)}")
    return names


def modes(text: str) -> tuple[SpeedMode, ...]:
    """Parse modes that are separated by commas; eager is added, because all else is compared with it."""
    names = {name.strip() for name in text.split(",")}
    if unknown := names.difference(SPEED_MODES):
        raise argparse.ArgumentTypeError(
            f"{min(unknown)!r} is not a mode; choose from {','.join(SPEED_MODES)}"
        )
    return tuple(mode for mode in SPEED_MODES if mode == "eager" or mode in names)


def executors(text: str) -> tuple[Executor, ...]:
    """Parse executors that are separated by commas."""
    names = {name.strip() for name in text.split(",")}
    if unknown := names.difference(EXECUTORS):
        raise argparse.ArgumentTypeError(
            f"{min(unknown)!r} is not an executor; choose from {','.join(EXECUTORS)}"
        )
    return tuple(executor for executor in EXECUTORS if executor in names)


def run(options: argparse.Namespace) -> int:
    """Measure each program, write the record after each, print the tables; the status says if all ran."""
    began = time.monotonic()
    setup = Setup(options.preset, options.seed, options.threads, options.amp, options.channels_last)
    plan = Plan(options.warmup, options.round_steps, options.rounds, options.round_seconds)
    entries = {name: contenders(name, options.modes, options.executors) for name in options.programs}
    if options.prepare:
        return _prepare([c for cs in entries.values() for c in cs], setup, plan)
    results: list[Result] = []
    pieces = sum(len(entered) + plan.rounds for entered in entries.values())
    with tqdm(total=pieces, desc="speed", file=sys.stderr, disable=None, leave=False) as bar:
        for done, entered in enumerate(entries.values()):
            left = options.budget - (time.monotonic() - began)
            before = bar.n
            results += measure(
                entered, setup, plan, seconds=left / (len(entries) - done), tick=lambda text: _tick(bar, text)
            )
            bar.update(len(entered) + plan.rounds - (bar.n - before))  # rounds there was no time for
            if options.out:
                write_record(options.out, options.given, results)
    objects = record(options.given, results)["results"]
    say(summary(objects))
    return 0 if all(result.error is None for result in results) else 1


def summary(results: list[dict[str, Any]]) -> str:
    """Return the tables and what they come to."""
    head, rows = speed_rows(results)
    return "\n".join(
        [
            plain_table(DETAILS, detail_rows(results)),
            *(f"{r['program']} {title(r)} fails: {r['error']}" for r in results if r["error"]),
            "",
            "speed, eager's step time over the mode's [p10, p90]:",
            plain_table(head, rows).replace("**", ""),
            "",
            *conclusions(results),
        ]
    )


def _prepare(entered: list[Contender], setup: Setup, plan: Plan) -> int:
    with tqdm(total=len(entered), desc="compiling", file=sys.stderr, disable=None, leave=False) as bar:
        results = prepare(entered, setup, plan, lambda text: _tick(bar, text))
    rows = [
        (r.program, r.mode, r.executor or "", "fails: " + r.error if r.error else f"{r.first_call_s:.1f}")
        for r in results
    ]
    say(plain_table(("program", "mode", "executor", "first call s"), rows))
    return 0 if all(result.error is None for result in results) else 1


def _tick(bar: Any, text: str) -> None:
    bar.set_postfix_str(text, refresh=False)
    bar.update()
