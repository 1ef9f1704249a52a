"""The costs that the op-level search works with: as many as the time allows, the most telling first.

In:  offers, a Measurer and a deadline.
Out: a Measurement for each offer that was known or could be measured.

Offers that do the same work (equal keys) share one measurement. What takes most of ATen's time comes
first: the whole graph on each backend, blocks and the largest fused groups, then what is inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from placement.backends.base import Backend
from placement.graph import bits
from placement.measuring.measurer import Measurer
from placement.measuring.protocol import Measurement
from placement.search.candidates import Offers

Progress = Callable[[str, int, int], None]
"""Is told what is done, how many of how many steps are behind."""

SMALLEST_SHARE = 0.002
"""Of ATen's whole time: segments that take less are left to ATen unmeasured."""
WEIGHTS = {"graph": 1e9, "block": 1.0, "pattern": 0.9, "rule": 0.9, "inner": 0.25}
"""How telling an offer is for the time it takes, by origin; `inner` are groups within larger ones."""


@dataclass
class Costs:
    """What is known of the offers of a graph."""

    of: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    """By backend and set of operations."""
    unmeasured: int = 0
    """Offers for which the time did not suffice."""
    too_small: int = 0
    """Offers that were left to ATen without measuring."""

    def alternatives(self, mask: int) -> dict[str, Measurement]:
        """What is known of one set of operations, by backend."""
        return {name: m for (name, other), m in self.of.items() if other == mask}


@dataclass(frozen=True)
class _Job:
    key: str
    masks: tuple[int, ...]
    backends: tuple[Backend, ...]
    score: float


def collect(
    offers: Offers,
    backends: Sequence[Backend],
    measurer: Measurer,
    deadline: float,
    progress: Progress = lambda what, done, total: None,
    reference: str = "aten",
) -> Costs:
    """Looks costs up and measures the missing ones until the deadline (of `time.perf_counter`)."""
    costs = Costs()
    by_name = {b.name: b for b in backends}
    aten_backend = by_name[reference]

    def key(mask: int) -> str:
        return measurer.key(aten_backend, mask).segment

    own = _jobs({reference: offers.masks[reference]}, by_name, key, lambda mask, origin: 1.0)
    for number, job in enumerate(own):
        progress("operations on ATen", number, len(own))
        _run(job, measurer, costs)
    aten = {mask: costs.of[reference, mask].cost_s for mask in offers.masks[reference]}
    total = sum(aten.values())

    def share(mask: int) -> float:
        return sum(aten.get(1 << i, 0.0) for i in bits(mask)) / total

    inner = {name: _inner(masks) for name, masks in offers.masks.items()}
    others: dict[str, dict[int, str]] = {}
    for name, masks in offers.masks.items():
        if name == reference:
            continue
        others[name] = {}
        for mask, origin in masks.items():
            if share(mask) < SMALLEST_SHARE:
                costs.too_small += 1
            else:
                others[name][mask] = "inner" if mask in inner[name] and origin != "graph" else origin
    jobs = _jobs(others, by_name, key, lambda mask, origin: WEIGHTS[origin] * share(mask))
    for number, job in enumerate(jobs):
        progress("segments on backends", number, len(jobs))
        _run(job, measurer, costs, deadline)
    return costs


def _run(job: _Job, measurer: Measurer, costs: Costs, deadline: float = float("inf")) -> None:
    missing = []
    for backend in job.backends:
        known = measurer.known(backend, job.masks[0])
        if known is None:
            missing.append(backend)
        else:
            costs.of.update({(backend.name, mask): known for mask in job.masks})
    if not missing:
        return
    measured = measurer.measure(job.masks[0], missing, deadline)
    for name, result in measured.items():
        costs.of.update({(name, mask): result for mask in job.masks})
    costs.unmeasured += (len(missing) - len(measured)) * len(job.masks)


def _jobs(
    masks: dict[str, dict[int, str]],
    by_name: dict[str, Backend],
    key: Callable[[int], str],
    score: Callable[[int, str], float],
) -> list[_Job]:
    """Offers with equal keys together, the most telling first."""
    grouped: dict[str, tuple[dict[int, None], dict[str, None], float]] = {}
    for name, found in masks.items():
        for mask, origin in found.items():
            members, names, best = grouped.setdefault(key(mask), ({}, {}, 0.0))
            members[mask] = None
            names[name] = None
            grouped[key(mask)] = (members, names, max(best, score(mask, origin)))
    jobs = [
        _Job(k, tuple(members), tuple(by_name[n] for n in names), best * len(members))
        for k, (members, names, best) in grouped.items()
    ]
    return sorted(jobs, key=lambda job: -job.score)


def _inner(masks: dict[int, str]) -> set[int]:
    """The groups that lie within another group of the same backend, found by pattern or rule."""
    groups = sorted(
        (m for m, o in masks.items() if o in ("pattern", "rule")), key=int.bit_count, reverse=True
    )
    largest_with: dict[int, list[int]] = {}
    inner = set()
    for mask in groups:
        low = next(bits(mask))
        if any(mask & other == mask for other in largest_with.get(low, ())):
            inner.add(mask)
        else:
            for i in bits(mask):
                largest_with.setdefault(i, []).append(mask)
    return inner
