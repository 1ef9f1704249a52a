"""Which of two ways of running a program's iterations is faster, measured.

In:  how long iterations take in the usual way, and now and then in the other one.
Out: in which way the next iteration runs.

- Dynamic phase: call by call, or eagerly. Sending calls to a queue costs Python time for each, which pays
  only where kernels are long.
- Co-execution phase, where kernels have as many threads as there are processors, so that Python and kernels
  hinder each other: the GraphRunner starts at once, or when Python needs a value or has left the block.

After some iterations in the usual way a few run in the other; the faster way is kept for a while, for longer
each time that the same one wins.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field

#: Iterations in the usual way that are timed (the later half of them), and in the other one after these.
TIMED, TIMED_OTHER = 24, 8
#: Iterations in the way that was faster before both are timed again: at first, and at most.
FIRST_STAY, LAST_STAY = 200, 12_800


@dataclass(slots=True)
class Pace:
    """What has been measured of one program."""

    other: bool = False  # which way was faster
    usual_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    stay: int = 0  # iterations before it is measured again
    stay_next: int = FIRST_STAY

    def next_is_other(self) -> bool:
        """Whether the next iteration runs in the other way."""
        return self.other if self.stay else len(self.usual_s) >= TIMED

    def took(self, seconds: float, *, other: bool) -> bool:
        """Takes in an iteration; whether it has shown that the other way is faster, and was not before."""
        if self.stay:
            self.stay -= 1
            return False
        (self.other_s if other else self.usual_s).append(seconds)
        if len(self.other_s) < TIMED_OTHER:
            return False
        faster = statistics.median(self.other_s) < statistics.median(self.usual_s[TIMED // 2 :])
        news = faster and not self.other
        self.stay_next = min(2 * self.stay_next, LAST_STAY) if faster is self.other else FIRST_STAY
        self.other, self.stay = faster, self.stay_next
        self.usual_s, self.other_s = [], []
        return news


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
