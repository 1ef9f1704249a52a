"""Train a program in one mode.

The mode runs as it does for a user: with co-execution, leaving a step doesn't wait for the GraphRunner. A
step's time is what the program waited for it; `wall_s` in the record is the whole training's.
"""

from __future__ import annotations

import argparse
import time

from bench.measured import Measured
from bench.modes import MODES, Run, start_run
from bench.options import add_program, progress, say, whole
from bench.programs import PROGRAMS
from bench.records import write_record
from bench.spread import spread_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_program(parser)
    parser.add_argument(
        "--mode", choices=MODES, default="coexec", help="how to run it (default: %(default)s)"
    )
    parser.add_argument("--steps", type=whole(1), default=200, help="training steps (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Train, print an epoch a line, write the record."""
    training_run = start_run(
        PROGRAMS[options.program],
        options.mode,
        executor=options.executor,
        seed=options.seed,
        preset=options.preset,
    )
    start = time.perf_counter()
    measured = train(training_run, options.steps)
    wall_s = time.perf_counter() - start
    say(f"step: median {spread_of(measured.step_ms)} ms [p10, p90], first {measured.step_ms[0] / 1e3:.2f} s")
    say(f"{options.steps} steps in {wall_s:.1f} s")
    if options.out:
        result = measured.result(options.seed, options.preset, wall_s=wall_s)
        write_record(options.out, options.given, [result])
    return 0


def train(run: Run, steps: int) -> Measured:
    """Take steps, and print a line after each epoch."""
    measured = Measured(run)
    with run.active():
        for _ in progress(range(steps), f"{run.program.name} {run.mode}"):
            measured.step()
            if run.steps % run.training.steps_per_epoch == 0:
                say(epoch_line(run))
        run.wait()
    return measured


def epoch_line(run: Run) -> str:
    """Say how the last epoch went."""
    epoch = run.steps // run.training.steps_per_epoch
    first_step = run.steps - run.training.steps_per_epoch
    logged = [loss for step, loss in run.training.logged if step >= first_step]
    loss, metric = sum(logged) / len(logged), run.metrics[-1][1]
    return f"epoch {epoch:3}  loss {loss:.4f}  {run.program.metric} {metric:.4f}"
