"""How times are taken, and what they say.

In:  functions to be compared.
Out: a Measurement each.

All functions of a comparison take turns in rounds of shuffled order, so that a machine that becomes
slower does so for all of them. The cost is the 10th percentile: the minimum is one lucky sample, the
median is what other load made of it.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Status = Literal["ok", "unsupported", "wrong", "crashed", "hung"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """How much to measure. A cell is one function of a comparison."""

    rounds: int = 5
    """Rounds of shuffled order, at least."""
    samples: int = 30
    """Samples of a cell, at least, unless `limit_s` is reached."""
    seconds: float = 0.1
    """Time that a cell's samples take together, at least."""
    limit_s: float = 2.0
    """Time after which a cell gets no more samples once it has two in each round."""
    warmup: int = 2
    """Calls before the first sample."""
    seed: int = 0
    """Of the order of the rounds."""
    clock: Literal["wall", "cpu"] = "wall"
    """`cpu` is the processor time of this process: for one thread, on a machine that others load."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is known of one segment on one backend. Times are seconds of one call."""

    status: Status
    cost_s: float = float("inf")
    """The 10th percentile; infinite unless the status is `ok`."""
    min_s: float = float("inf")
    median_s: float = float("inf")
    samples: int = 0
    load: float = 0.0
    """The machine's load average (1 minute) when it was measured."""
    unstable: bool = False
    """The median was over 1.5 times the 10th percentile, also when measured again."""
    detail: str = ""
    """Why it is unsupported, wrong, crashed or hung."""

    @property
    def ok(self) -> bool:
        """Whether it ran and was right."""
        return self.status == "ok"

    @property
    def spread(self) -> float:
        """How far the median is above the cost, relative to it."""
        return self.median_s / self.cost_s - 1 if self.ok else 0.0


UNSTABLE = 1.5
"""Median over 10th percentile from which a cell is measured again."""


def summarize(samples: Sequence[float], load: float) -> Measurement:
    """Sums up samples in seconds."""
    cost = float(np.percentile(samples, 10))
    median = statistics.median(samples)
    return Measurement(
        "ok", cost, min(samples), median, len(samples), load, unstable=median > UNSTABLE * cost
    )


def is_tie(left: Measurement, right: Measurement) -> bool:
    """Whether two costs don't differ beyond noise.

    They tie when minimum and median disagree about which is smaller, or when the gap is below 10 %
    and twice the larger spread.
    """
    if not left.ok or not right.ok:
        return False
    if (left.min_s < right.min_s) != (left.median_s < right.median_s):
        return True
    low, high = sorted((left.cost_s, right.cost_s))
    return high / low - 1 < max(0.10, 2 * min(max(left.spread, right.spread), 0.25))


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def compare(functions: Sequence[Callable[[], object]], protocol: Protocol) -> list[list[float]]:
    """Samples of each function, in seconds, taken in turns."""
    clock = CLOCKS[protocol.clock]
    order = list(range(len(functions)))
    shuffler = random.Random(protocol.seed)
    taken: list[list[float]] = [[] for _ in functions]
    for function in functions:
        for _ in range(protocol.warmup):
            function()
    spent = [0.0] * len(functions)
    per_round = -(-protocol.samples // protocol.rounds)
    done = 0
    while done < protocol.rounds or not all(
        _enough(s, t, protocol) for s, t in zip(taken, spent, strict=True)
    ):
        shuffler.shuffle(order)
        for index in order:
            if done >= protocol.rounds and _enough(taken[index], spent[index], protocol):
                continue
            function, samples = functions[index], taken[index]
            for position in range(per_round):
                start = clock()
                function()
                elapsed = clock() - start
                samples.append(elapsed)
                spent[index] += elapsed
                if position and spent[index] > protocol.limit_s * (done + 1) / protocol.rounds:
                    break
        done += 1
    return taken


def _enough(samples: Sequence[float], spent: float, protocol: Protocol) -> bool:
    if spent >= protocol.limit_s:
        return True
    return len(samples) >= protocol.samples and spent >= protocol.seconds


def measure(functions: Sequence[Callable[[], object]], protocol: Protocol) -> list[Measurement]:
    """Measures functions against each other; unstable ones are measured once more, and the better kept."""
    results = [summarize(s, load_average()) for s in compare(functions, protocol)]
    again = [i for i, r in enumerate(results) if r.unstable]
    if again:
        for index, samples in zip(again, compare([functions[i] for i in again], protocol), strict=True):
            second = summarize(samples, load_average())
            if not second.unstable or second.cost_s < results[index].cost_s:
                results[index] = second
    return results


def load_average() -> float:
    """How many processes wanted to run in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
