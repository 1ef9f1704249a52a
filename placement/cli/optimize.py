"""Optimize a model and print which part went to which backend.

TARGET is FILE.py:FUNCTION or MODULE:FUNCTION; the function takes no arguments and returns the model and a
tuple of example inputs. The model is put into evaluation mode.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from placement.errors import PlacementError
from placement.measuring.protocol import Protocol
from placement.optimize import optimize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("target", metavar="TARGET", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument(
        "--backends",
        type=lambda text: [name for name in text.split(",") if name],
        metavar="A,B",
        help="backends to consider (default: all that can be used here)",
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, metavar="S", help="seconds (default: %(default)g)"
    )
    parser.add_argument(
        "--level", choices=("op", "graph"), default="graph", help="how far to go (default: graph)"
    )
    parser.add_argument("--fuel", type=int, metavar="N", help="how many parts may leave ATen (default: all)")
    parser.add_argument("--log", metavar="FILE", help="the cost log (default: the user's)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch (default: as it is)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="what to measure; cpu is for one thread on a loaded machine (default: wall)",
    )
    parser.add_argument("--save", metavar="FILE.pt2", help="write the placed model")
    parser.add_argument("--draw", metavar="FILE.svg", help="draw the placement")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Optimize, print the report, write what was asked for."""
    if args.threads is not None:
        if args.threads < 1:
            raise PlacementError(f"--threads is {args.threads}; it must be at least 1.")
        torch.set_num_threads(args.threads)
    model, examples = _function(args.target)()
    placed = optimize(
        model.eval(),
        examples,
        backends=args.backends,
        budget_s=args.budget,
        log=args.log or "default",
        level=args.level,
        fuel=args.fuel,
        seed=args.seed,
        protocol=Protocol(clock=args.clock),
        progress=_progress if sys.stderr.isatty() else None,
    )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(placed.report())
    if args.json:
        Path(args.json).write_text(json.dumps(placed.report().to_json(), indent=1, default=str) + "\n")
    if args.save:
        placed.save(args.save)
    if args.draw:
        placed.draw(args.draw)
    return 0


def _progress(what: str, done: int, total: int) -> None:
    text = f"{what} {done}/{total}" if total else what
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _function(target: str) -> Callable[[], tuple[Any, Any]]:
    source, separator, name = target.rpartition(":")
    if not separator or not source or not name:
        raise PlacementError(f"{target!r} is not FILE.py:FUNCTION or MODULE:FUNCTION.")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except (ImportError, OSError) as error:
        raise PlacementError(f"{source} cannot be loaded: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise PlacementError(f"{source} has no function {name}.")
    return function  # type: ignore[no-any-return]
