"""Compare modes on one program, in one process, step by step.

In every round each mode takes one step, in an order that rotates, so that all see the same machine. Every
mode has its own model, built from the same seed, and its own stream of random numbers. At the end losses,
parameters, buffers, gradients and optimizer state are compared with eager's: bit for bit with the aten
executor, together with the state of the random generators, and within a relative tolerance (in the record)
with torch.compile and inductor. Training can make anything of a rounding error: with `--nudge` these may also
be about as far from eager as another eager run, whose parameters begin one unit in the last place higher.

Steps are synchronous here: the GraphRunner has finished when a step's time is taken. The first call's time
includes compilation with whatever the compilers' disk caches already hold.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from bench.measured import Measured
from bench.modes import MODES, Executor, Mode, start_run
from bench.options import add_program, modes, progress, say, whole
from bench.program import Preset, Program
from bench.programs import PROGRAMS
from bench.records import Result, write_record
from bench.spread import spread_of
from bench.state import NUDGES, State, compare_runs, nudge, snapshot
from bench.tables import plain_table

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_program(parser)
    parser.add_argument(
        "--modes",
        type=modes,
        default=",".join(MODES),
        help="which to run, separated by commas; eager always runs (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=whole(1), default=200, help="training steps of each mode (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=whole(0),
        default=20,
        help="first steps, which the printed medians leave out; the record has them (default: %(default)s)",
    )
    parser.add_argument(
        "--nudge",
        action="store_true",
        help="allow of modes that are not exact what training makes of a change in the last place",
    )


def run(options: argparse.Namespace) -> int:
    """Compare, print, write the record; the status says whether every mode ran and equalled eager."""
    results = compare(
        PROGRAMS[options.program],
        options.modes,
        executor=options.executor,
        steps=options.steps,
        warmup=options.warmup,
        seed=options.seed,
        preset=options.preset,
        nudged=options.nudge,
    )
    say(summary(results, options.warmup))
    if options.out:
        write_record(options.out, options.given, results)
    return 0 if all(result.equal for result in results) else 1


def compare(
    program: Program,
    chosen: Sequence[Mode],
    *,
    executor: Executor,
    steps: int,
    warmup: int,
    seed: int,
    preset: Preset,
    nudged: bool = False,
) -> list[Result]:
    """Run the modes interleaved and return one result each; a mode that fails has its error in its result.

    Raises:
        Exception: whatever eager raises, without which there is nothing to compare with.
    """
    running: dict[Mode, Measured] = {}
    errors: dict[Mode, str] = {}

    def fail(mode: Mode, error: Exception) -> None:
        if mode == "eager":
            raise error
        log.warning("%s fails in mode %s", program.name, mode, exc_info=error)
        errors[mode] = f"{type(error).__name__}: {error}"
        running.pop(mode, None)

    for mode in chosen:
        try:
            running[mode] = Measured(
                start_run(program, mode, executor=executor, seed=seed, preset=preset, synchronous=True)
            )
        except Exception as error:
            fail(mode, error)

    for index in progress(range(steps), f"{program.name}, {len(running)} modes"):
        first = index % len(chosen)
        for mode in (*chosen[first:], *chosen[:first]):
            if mode in running:
                try:
                    with running[mode].run.active():
                        running[mode].losses.append(running[mode].step().item())
                except Exception as error:
                    fail(mode, error)

    others = [_nudged(program, steps, seed, preset, n) for n in range(NUDGES)] if nudged else []
    results = []
    for mode in chosen:
        if mode in running:
            difference = compare_runs(
                running[mode].run, running[mode].losses, running["eager"].run, running["eager"].losses, others
            )
            results.append(running[mode].result(seed, preset, difference, warmup_steps=warmup, nudged=nudged))
        else:
            used = executor if mode in ("coexec", "lazy") else None
            results.append(Result(program.name, mode, used, equal=False, error=errors[mode]))
    return results


def _nudged(program: Program, steps: int, seed: int, preset: Preset, number: int) -> State:
    """Return what an eager run comes to that was nudged before its first step."""
    measured = Measured(start_run(program, "eager", seed=seed, preset=preset))
    nudge(measured.run, number)
    with measured.run.active():
        for _ in progress(range(steps), f"{program.name}, nudged"):
            measured.losses.append(measured.step().item())
    return snapshot(measured.run, measured.losses)


def summary(results: Sequence[Result], warmup: int) -> str:
    """Return a table of step times as ratios to eager, and what else there is to say of each mode."""
    eager_ms = spread_of(_samples(next(result for result in results if result.mode == "eager"), warmup))
    head = (
        "mode",
        "step / eager [p10, p90]",
        "first call s",
        "traces",
        "fallbacks",
        "co-executed",
        "equal to eager",
    )
    rows = []
    for result in results:
        name = f"{result.mode} ({result.executor})" if result.executor else result.mode
        if result.error:
            rows.append((name, "failed", "", "", "", "", result.error.splitlines()[0]))
            continue
        ratio = spread_of(_samples(result, warmup)).over(eager_ms.median)
        share = result.coexec_share
        rows.append(
            (
                name,
                str(ratio),
                f"{result.first_call_s:.2f}",
                _number(result.traces),
                _number(result.fallbacks),
                "" if share is None else f"{share:.1%}",
                _equality(result),
            )
        )
    return f"{results[0].program}: eager takes {eager_ms} ms a step\n{plain_table(head, rows)}"


def _samples(result: Result, warmup: int) -> Sequence[float]:
    return result.step_ms[warmup:] or result.step_ms


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _equality(result: Result) -> str:
    tolerance = result.details["tolerance"]
    how = "bit for bit" if tolerance is None else f"within {tolerance:g}"
    if tolerance is not None and result.details["nudged"]:
        how += " or what training makes of a change in the last place"
    if result.equal:
        return f"yes, {how}"
    return (
        f"no, not {how}: {result.details['first_difference']} (largest difference {result.max_abs_diff:.3g})"
    )
