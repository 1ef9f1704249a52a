"""Which way of running a program's iterations is the fastest, measured.

In:  how long iterations take in the usual way, and now and then in others.
Out: in which way the next iteration runs.

- Dynamic phase: call by call, or eagerly. Sending calls to a queue costs Python time for each, which pays
  only where kernels are long.
- Co-execution phase, where kernels have as many threads as there are processors, so that Python and kernels
  hinder each other: the GraphRunner starts at once, or when Python needs a value or has left the block, or
  the iteration runs eagerly. What Python leaves behind takes its time later, so that asynchronous iterations
  are timed from the beginning of one to the beginning of the next.

After some iterations in the usual way a few run in each of the others, fewer if one is much slower; the
fastest way is kept for a while, for longer each time that the same one wins.
"""

from __future__ import annotations

import enum
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Iterations in the usual way that are timed, and in each other one after these; their later halves count.
TIMED, TIMED_OTHER = 24, 16
#: Iterations that are enough of a way in which they take so many times as long as in another one.
TIMED_SLOW, SLOW = 6, 1.5
#: Iterations in the way that was the fastest before the others are timed again: at first, and at most.
FIRST_STAY, LAST_STAY = 200, 12_800


class Choice(enum.IntEnum):
    """A way of running an iteration."""

    USUAL = 0
    EAGER = 1
    LATE = 2  #: the GraphRunner starts when Python waits


@dataclass(slots=True)
class Pace:
    """What has been measured of one program; the usual one is the first of the `ways`."""

    ways: tuple[Choice, ...] = (Choice.USUAL, Choice.EAGER)
    fastest: Choice = Choice.USUAL
    seconds: dict[Choice, list[float]] = field(default_factory=dict)
    stay: int = 0  # iterations before the others are measured again
    stay_next: int = FIRST_STAY

    def next(self) -> Choice:
        """In which way the next iteration runs."""
        return self.fastest if self.stay else next(w for w in self.ways if self._lacks(w))

    def took(self, seconds: float, way: Choice) -> bool:
        """Takes in an iteration; whether it has shown that another way than before is the fastest."""
        taken = self.seconds.setdefault(way, [])
        taken.append(seconds)
        if self.stay:
            self.stay -= 1
            del taken[:-TIMED]  # the others will be compared with the latest ones
            return False
        if any(map(self._lacks, self.ways)):
            return False
        fastest = min(self.ways, key=lambda w: _typical(self.seconds[w]))
        news = fastest is not self.fastest
        self.stay_next = FIRST_STAY if news else min(2 * self.stay_next, LAST_STAY)
        self.fastest, self.stay = fastest, self.stay_next
        self.seconds = {}
        return news

    def _lacks(self, way: Choice) -> bool:
        """Whether it has to be timed further."""
        seconds = self.seconds.get(way, ())
        return not self._is_timed(way) and not (len(seconds) >= TIMED_SLOW and self._is_slow(seconds))

    def _is_timed(self, way: Choice) -> bool:
        return len(self.seconds.get(way, ())) >= (TIMED if way is Choice.USUAL else TIMED_OTHER)

    def _is_slow(self, seconds: Sequence[float]) -> bool:
        others = [_typical(self.seconds[w]) for w in self.ways if self._is_timed(w)]
        return bool(others) and _typical(seconds) > SLOW * min(others)


def _typical(seconds: Sequence[float]) -> float:
    """How long an iteration takes; in the first ones threads of kernels may still be those of another way."""
    return statistics.median(seconds[len(seconds) // 2 :])


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
