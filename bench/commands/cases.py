"""Run every case of a folder in eager and in co-execution, and compare all that can be observed.

A case is a small training program in a file of its own; `tests/cases/programs/README.md` states the contract.
Losses, exceptions, parameters, buffers, gradients, optimizer state, the case's side effects and the states of
the random generators are compared: bit for bit with the aten executor, within the case's tolerance with
inductor. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from bench.apart import ApartError, run_apart
from bench.cases import case_files, difference, load_case, run_case
from bench.modes import Executor
from bench.options import add_executor, add_out, add_timeout, say, whole
from bench.records import Result, resident_mb, write_record
from bench.tables import plain_table

WARM_UP_STEPS = 5
"""First steps, which the share of co-executed steps `coexec_share_after_5` leaves out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", type=folder_of_cases, metavar="DIR", help="where the cases are")
    add_executor(parser)
    parser.add_argument("--threads", type=whole(1), default=1, help="kernel threads (default: %(default)s)")
    add_timeout(parser, "case")
    add_out(parser)


def folder_of_cases(text: str) -> Path:
    """Parse a folder that holds at least one case."""
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    if not case_files(folder):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no cases: no Python file whose name begins with a digit"
        )
    return folder


def run(options: argparse.Namespace) -> int:
    """Run, print a line a case, write the record; the status says whether every case equalled eager."""
    results = []
    for path in tqdm(case_files(options.folder), desc="cases", unit="case", disable=None, leave=False):
        try:
            result = run_apart(functools.partial(compare_case, path, options.executor), options.timeout)
        except ApartError as error:
            result = Result(path.stem, "coexec", options.executor, equal=False, error=str(error))
        results.append(result)
    say(table(results))
    if options.out:
        write_record(options.out, options.given, results)
    return 0 if all(result.equal for result in results) else 1


def compare_case(path: Path, executor: Executor) -> Result:
    """Run one case in both ways and return how it went."""
    import coexec

    warnings.simplefilter("ignore")  # those that a case provokes in eager, too
    case = load_case(path)
    eager = run_case(case)
    if eager.error is not None:
        raise RuntimeError(f"the case fails in eager: {type(eager.error).__name__}: {eager.error}")
    coexec.reset()
    coexec.options.background = False  # what is compared is what was asked for
    coexec.options.eager_if_faster = False
    early = Counter[str]()

    def after_step(step: int) -> None:
        if step == WARM_UP_STEPS - 1:
            early.update(steps_by_phase())

    ours = run_case(case, functools.partial(coexec.GradientTape, executor=executor), after_step)
    tolerance = None if executor == "aten" else case.tolerance
    compared = difference(ours, eager, tolerance)
    programs = coexec.explain().programs
    phases = steps_by_phase()
    late = phases - early
    return Result(
        program=case.name,
        mode="coexec",
        executor=executor,
        step_ms=tuple(ours.step_ms),
        first_call_s=ours.step_ms[0] / 1e3,
        equal=compared.equal,
        max_abs_diff=compared.max_abs,
        traces=sum(program.traces for program in programs),
        fallbacks=sum(program.fallbacks for program in programs),
        coexec_share=coexec_share(phases),
        peak_rss_mb=resident_mb(),
        error=None if ours.error is None else f"{type(ours.error).__name__}: {ours.error}",
        details={
            "tolerance": tolerance,
            "first_difference": compared.first,
            "phases": dict(phases),
            "phases_after_5": dict(late),
            "coexec_share_after_5": coexec_share(late),
            "causes": sorted({cause.id for program in programs for cause in program.causes}),
            "eager_step_ms": eager.step_ms,
        },
    )


def table(results: list[Result]) -> str:
    """Return a line a case, and what they add up to."""
    head = ("case", "equal to eager", "traces", "fallbacks", "co-executed", "phases after 5 steps", "causes")
    rows = [_row(result) for result in results]
    equal = sum(bool(result.equal) for result in results)
    mostly = sum((result.details.get("coexec_share_after_5") or 0) >= 0.8 for result in results)
    return (
        f"{plain_table(head, rows)}\n{equal} of {len(results)} cases equal eager;"
        f" {mostly} spend at least 80 % of their steps after the fifth in the co-execution phase"
    )


def _row(result: Result) -> tuple[str, ...]:
    if result.traces is None:
        return (result.program, f"no: {result.error}".partition("\n")[0], "", "", "", "", "")
    what = "yes" if result.equal else f"no: {result.error or result.details['first_difference']}"
    return (
        result.program,
        what.partition("\n")[0],
        str(result.traces),
        str(result.fallbacks),
        percent(result.coexec_share),
        phases_text(result.details["phases_after_5"]),
        " ".join(result.details["causes"]),
    )


def steps_by_phase() -> Counter[str]:
    """Return how many steps of all programs each phase has had."""
    import coexec

    steps = Counter[str]()
    for program in coexec.explain().programs:
        steps.update(program.steps)
    return steps


def coexec_share(phases: Counter[str]) -> float | None:
    """Return the share of the steps in the co-execution phase; None if there were no steps."""
    return phases["co-execution"] / phases.total() if phases.total() else None


def phases_text(phases: dict[str, int]) -> str:
    """Return the share of each phase for a table, the largest first."""
    steps = Counter(phases)
    return ", ".join(f"{count / steps.total():.0%} {phase}" for phase, count in steps.most_common() if count)


def percent(share: float | None) -> str:
    """Return a share for a table."""
    return "" if share is None else f"{share:.0%}"
