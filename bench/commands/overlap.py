"""Measure what the two runners cost each other.

The program is trained until its graph exists; then the GraphRunner executes the graph of the last iteration,
speculatively and without Python, while the main thread counts in a pure-Python loop. Each round measures the
loop alone, the graph alone, and both at once. Printed are the loop's speed beside the graph as a share of its
speed alone (at most 1, larger is better), and the graph's time beside the loop over its time alone (at least
1, smaller is better).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from bench.measured import Measured, explain_run
from bench.modes import start_run
from bench.options import add_program, progress, say, whole
from bench.programs import PROGRAMS
from bench.records import write_record
from bench.spread import Spread, spread_of

# About 50 microseconds: short beside a graph, long beside reading the clock.
CHUNK = 1000


class Replay(Protocol):
    """The graph of a program's latest iteration, run again on its GraphRunner without committing anything."""

    def start(self) -> None:
        """Begin one execution and return at once."""

    def wait(self) -> float:
        """Wait for its end; return the milliseconds that it took on the GraphRunner's thread."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Samples of all rounds, in order."""

    loop_alone_per_ms: tuple[float, ...]
    """Iterations of the Python loop in a millisecond."""
    graph_alone_ms: tuple[float, ...]
    loop_beside_per_ms: tuple[float, ...]
    graph_beside_ms: tuple[float, ...]

    @property
    def loop_ratio(self) -> Spread:
        """The loop's speed beside the graph over its median speed alone."""
        return spread_of(self.loop_beside_per_ms).over(spread_of(self.loop_alone_per_ms).median)

    @property
    def graph_ratio(self) -> Spread:
        """The graph's time beside the loop over its median time alone."""
        return spread_of(self.graph_beside_ms).over(spread_of(self.graph_alone_ms).median)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_program(parser)
    parser.add_argument(
        "--steps", type=whole(1), default=30, help="training steps before measuring (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=whole(1), default=100, help="times that each is measured (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Train, measure, print the ratios, write the record."""
    from coexec.replay import Replay as GraphReplay

    run = start_run(
        PROGRAMS[options.program],
        "coexec",
        executor=options.executor,
        seed=options.seed,
        preset=options.preset,
        synchronous=True,
    )
    measured = Measured(run)
    with run.active():
        for _ in progress(range(options.steps), "training"):
            measured.step()
    report = explain_run(run)
    assert report is not None
    overlap = measure(GraphReplay(report.key), options.rounds)
    say(f"{options.program}, executor {options.executor}, {options.threads} kernel threads")
    say(f"graph alone      {spread_of(overlap.graph_alone_ms)} ms [p10, p90]")
    say(f"loop's speed     {overlap.loop_ratio} of its speed alone")
    say(f"graph's time     {overlap.graph_ratio} of its time alone")
    if options.out:
        result = measured.result(
            options.seed,
            options.preset,
            **asdict(overlap),
            loop_ratio=asdict(overlap.loop_ratio),
            graph_ratio=asdict(overlap.graph_ratio),
        )
        write_record(options.out, options.given, [result])
    return 0


def measure(replay: Replay, rounds: int) -> Overlap:
    """Measure the loop, the graph and both, round by round, so that all three see the same machine."""
    replay.start()
    typical_ms = replay.wait()
    loop_alone, graph_alone, loop_beside, graph_beside = [], [], [], []
    for _ in progress(range(rounds), "overlap"):
        loop_alone.append(_speed(_count_for(typical_ms)))

        replay.start()
        typical_ms = replay.wait()
        graph_alone.append(typical_ms)

        replay.start()
        # The graph may take twice its time; the chunks after its end are left out.
        chunk_ends = _count_for(2 * typical_ms)
        graph_ms = replay.wait()
        graph_beside.append(graph_ms)
        beside = [end for end in chunk_ends if end <= graph_ms]
        if len(beside) > 1:
            loop_beside.append(_speed(beside))
    return Overlap(tuple(loop_alone), tuple(graph_alone), tuple(loop_beside), tuple(graph_beside))


def _count_for(duration_ms: float) -> list[float]:
    """Count in pure Python; return when each chunk ended, in milliseconds from now."""
    ends = [0.0]
    start = time.perf_counter()
    while ends[-1] < duration_ms:
        count = 0
        while count < CHUNK:
            count += 1
        ends.append((time.perf_counter() - start) * 1e3)
    return ends


def _speed(chunk_ends: Sequence[float]) -> float:
    """Return the iterations in a millisecond."""
    return CHUNK * (len(chunk_ends) - 1) / (chunk_ends[-1] - chunk_ends[0])
