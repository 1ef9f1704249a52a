"""Draw when the two runners compute and when they wait, in a few steps of a program.

The program is trained first until it has warmed up. Then a few steps are recorded and written as
timeline.json (Chrome trace events, for ui.perfetto.dev) and as timeline.png: a lane for Python and one for
the graph, in four colors, execution and stall of each. It runs as it does for a user: with the option
`synchronous` at its default.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.modes import start_run
from bench.options import add_program, progress, say, whole
from bench.programs import PROGRAMS

OUT = Path(__file__).parents[1] / "out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_program(parser, record=False)
    parser.add_argument(
        "--mode",
        choices=("coexec", "lazy"),
        default="coexec",
        help="how to run it; lazy lets the graph wait for Python (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=whole(1), default=3, help="training steps that are recorded (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=whole(0), default=30, help="training steps before them (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: bench/out/profile_PROGRAM)",
    )


def run(options: argparse.Namespace) -> int:
    """Train, record, write both files, print the medians."""
    import coexec

    run = start_run(
        PROGRAMS[options.program],
        options.mode,
        executor=options.executor,
        seed=options.seed,
        preset=options.preset,
    )
    folder = options.out or OUT / f"profile_{options.program}"
    with run.active():
        for _ in progress(range(options.warmup), f"{options.program} warm-up"):
            run.training.step(run.tape)
        with coexec.GradientTape.profile(folder) as profile:
            for _ in range(options.steps):
                run.training.step(run.tape)
    say(profile.timeline.summary())
    say(f"written to {os.path.relpath(folder)}: timeline.json (for ui.perfetto.dev), timeline.png")
    return 0
