"""The contenders of one program take turns.

Each warms up alone. Then, in every round, each takes the same number of steps, in an order that rotates; a
machine that becomes slower does so for all. What fails, or is not ready in time, has its error in its result.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.records import Result
from bench.speed.contenders import Contender, Setup
from bench.speed.worker import Steps, Worker, WorkerError

LEAST_ROUNDS = 3
ROUNDS_SHARE = 0.3
"""Of a program's time that is kept for its rounds."""
LEAST_WARM_UP_S = 20.0
"""That a contender gets even when its program's time is up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often."""

    warm_up: int
    """Steps of each contender that are not measured."""
    round_steps: int
    """The least steps of each contender in a round."""
    rounds: int
    """The most; fewer when the time is up."""
    round_s: float = 0.0
    """Seconds that eager takes for a round at least: in a turn of a few milliseconds most of the time goes
    into caches and threads that other processes had."""


@dataclass(slots=True)
class _Turns:
    """A contender and what was measured of it."""

    contender: Contender
    worker: Worker | None = None
    taken: list[Steps] = field(default_factory=list)
    error: str | None = None

    def step(self, action: Callable[[Worker], Steps]) -> None:
        """Take steps, or note why that is not possible any more."""
        assert self.worker is not None
        try:
            self.taken.append(action(self.worker))
        except WorkerError as error:
            self.worker, self.error = None, str(error)


def measure(
    contenders: Sequence[Contender],
    setup: Setup,
    plan: Plan,
    *,
    seconds: float,
    tick: Callable[[str], None],
) -> list[Result]:
    """Run the contenders of one program and return one result each.

    Args:
        contenders: in the order in which they warm up.
        setup: their common size and seed.
        plan: numbers of steps and rounds.
        seconds: after which no new round begins; the first three are taken all the same.
        tick: called with a title after each warm-up and each round.
    """
    began = time.monotonic()
    load = [os.getloadavg()[0]]
    turns = [_Turns(contender) for contender in contenders]
    for turn in turns:
        left = began + seconds * (1 - ROUNDS_SHARE) - time.monotonic()
        limit = max(left, LEAST_WARM_UP_S)
        turn.worker = Worker(turn.contender, setup)
        turn.step(lambda worker, limit=limit: worker.take(plan.warm_up, measured=False, timeout_s=limit))  # type: ignore[misc]
        if turn.error and turn.error.startswith("not done"):
            turn.error = f"warm-up {turn.error}: a larger --budget, or --prepare before, lets it take part"
        tick(f"{turn.contender.program} {turn.contender.title}")
    steps = round_steps(plan, turns[0].taken)
    for index in range(plan.rounds):
        if index >= LEAST_ROUNDS and time.monotonic() - began > seconds:
            break
        first = index % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            if turn.worker is not None:
                turn.step(lambda worker: worker.take(steps, measured=True))
        tick(f"{turns[0].contender.program} round {index + 1}")
    load.append(os.getloadavg()[0])
    return [_result(turn, setup, load) for turn in turns]


def round_steps(plan: Plan, warm_up: Sequence[Steps]) -> int:
    """Return the steps of each round, given the warm-up of the first contender."""
    if not warm_up:
        return plan.round_steps
    settled = warm_up[0].step_ms[len(warm_up[0].step_ms) // 2 :]
    return max(plan.round_steps, math.ceil(1e3 * plan.round_s / statistics.median(settled)))


def prepare(
    contenders: Sequence[Contender], setup: Setup, plan: Plan, tick: Callable[[str], None]
) -> list[Result]:
    """Let each contender warm up, as many at once as there are cores; compilers keep their work on disk."""

    def warm_up(contender: Contender) -> Result:
        turn = _Turns(contender, Worker(contender, setup))
        turn.step(lambda worker: worker.take(plan.warm_up, measured=False))
        tick(f"{contender.program} {contender.title}")
        return _result(turn, setup, list(os.getloadavg()[:1]))

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // setup.threads)) as pool:
        return list(pool.map(warm_up, contenders))


def _result(turn: _Turns, setup: Setup, load: list[float]) -> Result:
    facts: dict[str, Any] = {}
    if turn.worker is not None:
        try:
            facts = turn.worker.facts()
        except WorkerError as error:
            turn.error = str(error)
    step_ms = tuple(ms for taken in turn.taken for ms in taken.step_ms)
    details = {
        "preset": setup.preset,
        "seed": setup.seed,
        "amp": setup.amp,
        "channels_last": setup.channels_last,
        "warmup_steps": len(turn.taken[0].step_ms) if turn.taken else 0,
        "warm_up_s": sum(turn.taken[0].step_ms) / 1e3 if turn.taken else None,
        "round_ms": [taken.mean_ms for taken in turn.taken[1:]],
        "load": load,
    }
    named = ("peak_rss_mb", "traces", "fallbacks", "coexec_share")
    return Result(
        program=turn.contender.program,
        mode=turn.contender.mode,
        executor=turn.contender.executor,
        step_ms=step_ms,
        first_call_s=step_ms[0] / 1e3 if step_ms else None,
        error=turn.error,
        details=details | {name: value for name, value in facts.items() if name not in named},
        **{name: facts.get(name) for name in named},
    )
