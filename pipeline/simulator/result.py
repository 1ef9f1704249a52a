"""What a simulation gives: events in time, and what can be read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.actions import Action, Compute, Kind
from pipeline.program import Program


class Event(NamedTuple):
    """A computation, a transfer or a reduction, in seconds.

    Attributes:
        rank: Where it runs; for a transfer, the rank that gives.
        peer: For a transfer, the rank that takes; else -1.
        action: What it is; for a transfer, the giving end.
        start: When it starts.
        end: When it ends.
        cause: Index of the event whose end it had to wait for; -1 for the start of the program.
    """

    rank: int
    peer: int
    action: Action
    start: float
    end: float
    cause: int


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated program.

    Attributes:
        program: The program.
        events: Everything that took time, in the order in which it started to be known.
        makespan_s: When the last rank is done.
        memory: For each rank, seconds and bytes held from then on.
    """

    program: Program
    events: tuple[Event, ...]
    makespan_s: float
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        busy = [0.0] * len(self.program.ranks)
        for event in self.events:
            if isinstance(event.action, Compute):
                busy[event.rank] += event.end - event.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Time that the busiest rank idles, as a share of the time that it computes.

        Source: PTD-P, section 4.2.2, "bubble time fraction".
        """
        busy = max(self.busy_s)
        return (self.makespan_s - busy) / busy if busy else 0.0

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank holds."""
        return tuple(max(held for _, held in trace) for trace in self.memory)

    @property
    def critical_path(self) -> tuple[Event, ...]:
        """Events, first to last, each of which waited for the one before, up to the end of the program."""
        if not self.events:
            return ()
        at = max(range(len(self.events)), key=lambda i: self.events[i].end)
        path = []
        while at >= 0:
            path.append(self.events[at])
            at = self.events[at].cause
        return tuple(reversed(path))

    @property
    def steady_s(self) -> float:
        """Seconds between micro-batches of the first stage in the middle third of the program.

        For a schedule that never flushes this is its pace, without the filling and draining of the pipeline.
        """
        ends = sorted(
            event.end
            for event in self.events
            if isinstance(event.action, Compute)
            and event.action.stage == 0
            and event.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        )
        return _pace(ends)


def _pace(ends: Sequence[float]) -> float:
    first, last = len(ends) // 3, 2 * len(ends) // 3
    if last <= first:
        return ends[-1] / len(ends) if ends else 0.0
    return (ends[last] - ends[first]) / (last - first)
