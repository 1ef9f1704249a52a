"""Whether running a program call by call is worth its price, measured.

In:  how long iterations of the dynamic phase take, and now and then eager ones.
Out: whether the next iteration is an eager one.

Sending calls to a queue costs Python time for each, which pays only where kernels are long. After some
iterations of the dynamic phase a few run eagerly; the faster way is kept for a while, for longer each time
that the same one wins.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

#: Iterations of the dynamic phase that are timed (the later half of them), and eager ones after these.
TIMED, TIMED_EAGER = 24, 8
#: Iterations in the way that was faster before both are timed again: at first, and at most.
FIRST_STAY, LAST_STAY = 200, 12_800


@dataclass(slots=True)
class Pace:
    """What has been measured of one program."""

    eager: bool = False  # which way was faster
    dynamic_s: list[float] = field(default_factory=list)
    eager_s: list[float] = field(default_factory=list)
    stay: int = 0  # iterations before it is measured again
    stay_next: int = FIRST_STAY

    def next_is_eager(self) -> bool:
        """Whether the next iteration runs eagerly."""
        return self.eager if self.stay else len(self.dynamic_s) >= TIMED

    def took(self, seconds: float, *, eager: bool) -> bool:
        """Takes in an iteration; whether it has shown that eager execution is faster, and was not before."""
        if self.stay:
            self.stay -= 1
            return False
        (self.eager_s if eager else self.dynamic_s).append(seconds)
        if len(self.eager_s) < TIMED_EAGER:
            return False
        faster = statistics.median(self.eager_s) < statistics.median(self.dynamic_s[TIMED // 2 :])
        news = faster and not self.eager
        self.stay_next = min(2 * self.stay_next, LAST_STAY) if faster is self.eager else FIRST_STAY
        self.eager, self.stay = faster, self.stay_next
        self.dynamic_s, self.eager_s = [], []
        return news
