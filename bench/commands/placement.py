"""Compare placements with eager, torch.compile and every single backend.

Each workload runs in all modes in one process, in turns: eager; torch.compile by default, with
max-autotune, and frozen; each backend alone for the whole graph (single:NAME); the op-level placement
(placement:op); and what placement.optimize returns (placement:two-level). The search's time is recorded
cold and with the log of the cold one. With --ablation, backends are added one by one.

Records of earlier runs are shown again with --show FILE.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.options import say, whole
from bench.placing import COMPILE_MODES, Plan, measure_workload
from bench.placing_report import convergence_plot, speed_plot, summary
from bench.records import Result, record, write_record
from bench.workloads import MODELS, WORKLOADS
from placement.measuring.conditions import keep_memory
from placement.measuring.protocol import Protocol


def names_of(known: Sequence[str]) -> Any:
    """Return a parser of names with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {','.join(known)}")
        return names

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--workloads",
        type=names_of(list(WORKLOADS)),
        default=tuple(WORKLOADS),
        metavar="A,B",
        help=f"which to run; trainings have their own batch size (default: {','.join(WORKLOADS)})",
    )
    parser.add_argument(
        "--batch", type=whole(1), action="append", metavar="N", help="batch size; repeatable (default: 1)"
    )
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny is for tests")
    parser.add_argument(
        "--budget", type=float, default=300.0, metavar="S", help="of each search (default: %(default)g)"
    )
    parser.add_argument(
        "--backends", type=lambda t: tuple(t.split(",")), metavar="A,B", help="default: all that are usable"
    )
    parser.add_argument(
        "--compile-modes",
        type=names_of(list(COMPILE_MODES)),
        default=tuple(COMPILE_MODES),
        metavar="A,B",
        help=f"modes of torch.compile, empty for none (default: {','.join(COMPILE_MODES)})",
    )
    parser.add_argument("--ablation", action="store_true", help="also add backends one by one")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of the process, for one thread on a loaded machine (default: wall)",
    )
    parser.add_argument(
        "--log", metavar="FILE", help="cost log (default: a new one, so that searches are cold)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and search (default: 0)")
    parser.add_argument("--threads", type=whole(1), default=1, help="kernel threads (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the record here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the speeds")
    parser.add_argument("--convergence", type=Path, metavar="FILE.png", help="draw the graph-level searches")
    parser.add_argument(
        "--show",
        type=Path,
        action="append",
        metavar="FILE.json",
        help="show a record instead of measuring; repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Measure or show, write what was asked for; the status says whether every mode equalled eager."""
    if options.show:
        results = [row for path in options.show for row in json.loads(path.read_text())["results"]]
    else:
        measured = _measure(options)
        results = record(options.given, measured)["results"]
    say(summary(results))
    if options.plot:
        speed_plot(results, options.plot)
    if options.convergence:
        convergence_plot(results, options.convergence)
    return 0 if all(r["equal"] for r in results if not r["error"]) else 1


def _measure(options: argparse.Namespace) -> list[Result]:
    keep_memory()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        plan = Plan(
            size=options.size,
            budget_s=options.budget,
            seed=options.seed,
            log=options.log or str(Path(folder) / "costs.sqlite"),
            protocol=Protocol(clock=options.clock),
            backends=options.backends,
            compile_modes=options.compile_modes,
            ablation=options.ablation,
        )
        batches = options.batch or [1]
        pairs = [(n, b) for n in options.workloads for b in (batches if n in MODELS else batches[:1])]
        with tqdm(pairs, unit="workload", file=sys.stderr, disable=None) as bar:
            for name, batch in bar:
                results += measure_workload(WORKLOADS[name], batch, plan, bar.set_postfix_str)
                if options.out:  # after each, so that nothing measured is lost
                    write_record(options.out, options.given, results)
    return results
