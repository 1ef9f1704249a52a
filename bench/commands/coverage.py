"""Try which ways of capturing carry which programs: every case and program, with every peer.

Peers are torch.compile (default and fullgraph), torch.jit.trace and torch.export of the model, and
co-execution with the aten executor. Each pair runs in a process of its own; said are whether it ran, whether
everything equalled eager, graph breaks and recompilations, or traces and fallbacks, and the share of steps
in the co-execution phase. Co-execution is held to eager's bits, the others to a tolerance.

A case is compiled as a step, a program as its models and (never as one graph) its optimizers' steps.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from bench.apart import ApartError, run_apart
from bench.cases import case_files, difference, load_case, run_case
from bench.commands.cases import (
    WARM_UP_STEPS,
    coexec_share,
    compare_case,
    folder_of_cases,
    phases_text,
    steps_by_phase,
)
from bench.measured import Measured
from bench.modes import called_models, compile_training, start_run
from bench.options import add_out, add_timeout, say, whole
from bench.peers import (
    BACKENDS,
    PEERS,
    Backend,
    Peer,
    capture_models,
    compile_options,
    count_compilations,
)
from bench.program import PRESETS, Preset, Program, missing_packages
from bench.programs import PROGRAMS
from bench.records import Result, write_record
from bench.state import RELATIVE_TOLERANCE, Difference, compare_states, snapshot
from bench.tables import plain_table

CASES = Path(__file__).parents[2] / "tests" / "cases" / "programs"


class NotCalledError(RuntimeError):
    """A capture of the model means nothing: the program never calls it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--cases",
        type=folder_of_cases,
        default=CASES,
        metavar="DIR",
        help="where the cases are (default: the repository's)",
    )
    parser.add_argument(
        "--only", type=names, default=(), help="names of cases and programs, by commas (default: all)"
    )
    parser.add_argument(
        "--peers",
        type=peers,
        default=",".join(PEERS),
        help="what to try, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="inductor",
        help="of torch.compile; aot_eager has the same front end and compiles faster (default: %(default)s)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="size of the programs (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=whole(1), default=30, help="training steps of a program (default: %(default)s)"
    )
    add_timeout(parser, "pair")
    add_out(parser)


def names(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas."""
    return tuple(name.strip() for name in text.split(","))


def peers(text: str) -> tuple[Peer, ...]:
    """Parse peers that are separated by commas."""
    for name in names(text):
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a peer; choose from {','.join(PEERS)}")
    return tuple(peer for peer in PEERS if peer in names(text))


def run(options: argparse.Namespace) -> int:
    """Try every pair, print a line each, write the record after each."""
    torch.set_num_threads(1)
    work = list(_pairs(options))
    results: list[Result] = []
    for name, peer, try_pair in tqdm(work, desc="coverage", unit="pair", disable=None, leave=False):
        try:
            result = run_apart(try_pair, options.timeout)
        except ApartError as error:
            result = Result(name, peer, equal=False, error=str(error))
        results.append(result)
        if options.out:
            write_record(options.out, options.given, results)
    say(table(results))
    return 0


def _pairs(options: argparse.Namespace) -> list[tuple[str, Peer, Callable[[], Result]]]:
    pairs: list[tuple[str, Peer, Callable[[], Result]]] = []
    for path in case_files(options.cases):
        if not options.only or path.stem in options.only:
            for peer in options.peers:
                pairs.append((path.stem, peer, functools.partial(try_case, path, peer, options.backend)))
    for program in PROGRAMS.values():
        if (not options.only or program.name in options.only) and not missing_packages(program):
            for peer in options.peers:
                attempt = functools.partial(
                    try_program, program, peer, options.backend, options.preset, options.steps
                )
                pairs.append((program.name, peer, attempt))
    if not pairs:
        raise SystemExit(f"no case and no program is called {' or '.join(options.only)}")
    return pairs


def try_case(path: Path, peer: Peer, backend: Backend) -> Result:
    """Run one case in eager and with a peer."""
    if peer == "coexec":
        return compare_case(path, "aten")
    warnings.simplefilter("ignore")
    case = load_case(path)
    eager = run_case(case)
    captured: list[Any] = []

    def prepare(state: SimpleNamespace) -> Callable[..., Any]:
        if peer == "compile" or peer == "fullgraph":
            compiled: Callable[..., Any] = torch.compile(case.module.step, **compile_options(peer, backend))
            return compiled
        captured.extend(capture_models((state.model,), peer))
        step: Callable[..., Any] = case.module.step
        return step

    ours = run_case(case, prepare=prepare)
    compared = difference(ours, eager, case.tolerance)
    error = None if ours.error is None else _first_line(ours.error)
    if captured and all(capture.captured is None for capture in captured) and error is None:
        error = _first_line(NotCalledError("the program never calls its model"))
    return _result(case.name, peer, ours.step_ms, compared, error)


def try_program(program: Program, peer: Peer, backend: Backend, preset: Preset, steps: int) -> Result:
    """Train one program in eager and with a peer."""
    warnings.simplefilter("ignore")
    eager, ours = (
        Measured(start_run(program, mode, preset=preset, synchronous=True))
        for mode in ("eager", "coexec" if peer == "coexec" else "eager")
    )
    if peer == "compile" or peer == "fullgraph":
        compile_training(ours.run.training, compile_options(peer, backend))
    elif peer != "coexec":
        capture_models(called_models(ours.run.training.model), peer)
    error, early = None, Counter[str]()
    for step in range(steps):
        with eager.run.active():
            eager.losses.append(eager.step().item())
        if error is None:
            try:
                with ours.run.active():
                    ours.losses.append(ours.step().item())
            except Exception as raised:
                error = _first_line(raised)
        if peer == "coexec" and step == WARM_UP_STEPS - 1:
            early = steps_by_phase()
    compared = compare_states(
        snapshot(ours.run, ours.losses),
        snapshot(eager.run, eager.losses),
        None if peer == "coexec" else RELATIVE_TOLERANCE,
    )
    if peer == "coexec" and error is None:
        late = steps_by_phase() - early
        return ours.result(
            0, preset, compared, coexec_share_after_5=coexec_share(late), phases_after_5=dict(late)
        )
    return _result(program.name, peer, ours.step_ms, compared, error)


def _result(name: str, peer: Peer, step_ms: list[float], compared: Difference, error: str | None) -> Result:
    details: dict[str, Any] = {"runs": error is None, "first_difference": compared.first}
    if peer in ("compile", "fullgraph"):
        counts = count_compilations()
        details |= {"graph_breaks": counts.graph_breaks, "recompilations": counts.recompilations}
    return Result(
        name,
        peer,
        step_ms=tuple(step_ms),
        first_call_s=step_ms[0] / 1e3 if step_ms else None,
        equal=compared.equal and error is None,
        max_abs_diff=compared.max_abs,
        error=error,
        details=details,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def table(results: list[Result]) -> str:
    """Return a line a case or program and a column a peer."""
    columns = list(dict.fromkeys(result.mode for result in results))
    rows: dict[str, dict[str, str]] = {}
    for result in results:
        rows.setdefault(result.program, {})[result.mode] = outcome(result)
    return plain_table(
        ("program", *columns), [(name, *(row.get(c, "") for c in columns)) for name, row in rows.items()]
    )


def outcome(result: Result) -> str:
    """Return what came of a pair, in a few words."""
    if result.error:
        return "fails" if "NotCalledError" not in result.error else "-"
    verdict = "equal" if result.equal else "differs"
    if result.mode == "coexec":
        phases = phases_text(result.details["phases_after_5"])
        return f"{verdict}, {result.traces} traces, {result.fallbacks} fallbacks, {phases}"
    if "graph_breaks" in result.details:
        breaks, again = result.details["graph_breaks"], result.details["recompilations"]
        return f"{verdict}, {breaks} breaks, {again} recompilations"
    return verdict
