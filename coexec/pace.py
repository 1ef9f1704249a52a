"""Which way of running a program's iterations is the fastest, measured.

In:  how long iterations take in the usual way, and now and then in others.
Out: in which way the next iteration runs.

- Dynamic phase: call by call, or eagerly. Sending calls to a queue costs Python time for each, which pays
  only where kernels are long.
- Co-execution phase, where kernels have as many threads as there are processors, so that Python and kernels
  hinder each other: the GraphRunner starts at once, or when Python needs a value or has left the block, or
  the iteration runs eagerly.

After some iterations in the usual way a few run in each of the others; the fastest way is kept for a while,
for longer each time that the same one wins.
"""

from __future__ import annotations

import enum
import os
import statistics
from dataclasses import dataclass, field

#: Iterations in the usual way that are timed, and in each other one after these; their later halves count.
TIMED, TIMED_OTHER = 24, 16
#: Iterations in the way that was the fastest before all are timed again: at first, and at most.
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
    stay: int = 0  # iterations before it is measured again
    stay_next: int = FIRST_STAY

    def next(self) -> Choice:
        """In which way the next iteration runs."""
        return self.fastest if self.stay else next(w for w in self.ways if self._lacks(w))

    def took(self, seconds: float, way: Choice) -> bool:
        """Takes in an iteration; whether it has shown that another way than before is the fastest."""
        if self.stay:
            self.stay -= 1
            return False
        self.seconds.setdefault(way, []).append(seconds)
        if any(map(self._lacks, self.ways)):
            return False
        # In the first ones a program, or threads of kernels, may still be those of another way.
        fastest = min(self.ways, key=lambda w: statistics.median(self.seconds[w][_timed(w) // 2 :]))
        news = fastest is not self.fastest
        self.stay_next = FIRST_STAY if news else min(2 * self.stay_next, LAST_STAY)
        self.fastest, self.stay = fastest, self.stay_next
        self.seconds = {}
        return news

    def _lacks(self, way: Choice) -> bool:
        """Whether it has to be timed further."""
        return len(self.seconds.get(way, ())) < _timed(way)


def _timed(way: Choice) -> int:
    return TIMED if way is Choice.USUAL else TIMED_OTHER


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
