"""Samples summarised by their median and the interval that holds most of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, and the values that 10 % and 90 % of the samples lie below."""

    median: float
    p10: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.p10:.2f}, {self.p90:.2f}]"

    def over(self, unit: float) -> Spread:
        """Return the same in multiples of `unit`."""
        return Spread(self.median / unit, self.p10 / unit, self.p90 / unit)


def spread_of(samples: Sequence[float]) -> Spread:
    """Summarise at least one sample."""
    p10, median, p90 = np.percentile(samples, [10, 50, 90])
    return Spread(float(median), float(p10), float(p90))
