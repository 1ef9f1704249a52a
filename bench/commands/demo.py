"""Train the digits classifier with co-execution and compare it with eager.

Shows the loss falling and the accuracy on images that it was not trained on, says whether both trainings
ended in the same bits, prints what coexec has to explain, and draws the TraceGraph. The exit status is 0 when
the accuracy is at least 97 % and the two are equal.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from bench.commands.train import train
from bench.measured import Measured, explain_run
from bench.modes import Mode, start_run
from bench.options import add_run, say, whole
from bench.programs import digits
from bench.records import write_record
from bench.state import Difference, compare_runs, tolerance_of

LEAST_ACCURACY = 0.97
PICTURE = Path(__file__).parents[1] / "out" / "digits_tracegraph.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument(
        "--epochs", type=whole(1), default=15, help="passes over the training images (default: %(default)s)"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=PICTURE,
        metavar="FILE.svg",
        help="where to draw the TraceGraph (default: bench/out/digits_tracegraph.svg)",
    )


def run(options: argparse.Namespace) -> int:
    """Train twice, compare, explain, draw."""
    import coexec

    coexecuted = _train("coexec", options)
    eager = _train("eager", options)
    difference = compare_runs(coexecuted.run, _losses(coexecuted), eager.run, _losses(eager))

    say(str(coexec.explain()))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    report = explain_run(coexecuted.run)
    assert report is not None
    coexec.draw(report, options.picture)
    say(f"the TraceGraph is drawn in {os.path.relpath(options.picture)}")

    accuracy = coexecuted.run.metrics[-1][1]
    say(verdict(accuracy, difference, tolerance_of(coexecuted.run)))
    if options.out:
        results = [
            coexecuted.result(options.seed, options.preset, difference),
            eager.result(options.seed, options.preset, Difference(True, 0.0, None)),
        ]
        write_record(options.out, options.given, results)
    return 0 if accuracy >= LEAST_ACCURACY and difference.equal else 1


def verdict(accuracy: float, difference: Difference, tolerance: float | None) -> str:
    """Say how good the classifier is and how it compares with eager's."""
    how = "bit for bit" if tolerance is None else f"within a relative {tolerance:g}"
    what = "losses, parameters, buffers, optimizer state"
    if difference.equal:
        equality = f"co-execution equalled eager {how}: {what}" + ("" if tolerance else ", random generators")
    else:
        equality = (
            f"co-execution did NOT equal eager {how}: {difference.first} differs"
            f" (largest difference {difference.max_abs:.3g})"
        )
    goal = "" if accuracy >= LEAST_ACCURACY else f", below the {LEAST_ACCURACY:.0%} that it should reach"
    return f"test accuracy {accuracy:.2%}{goal}\n{equality}"


def _train(mode: Mode, options: argparse.Namespace) -> Measured:
    run = start_run(digits.PROGRAM, mode, executor=options.executor, seed=options.seed, preset=options.preset)
    say(f"training digits, mode {mode}")
    start = time.perf_counter()
    measured = train(run, options.epochs * run.training.steps_per_epoch)
    say(f"{len(measured.step_ms)} steps in {time.perf_counter() - start:.1f} s\n")
    return measured


def _losses(measured: Measured) -> list[float]:
    return [loss for _, loss in measured.run.training.logged]
