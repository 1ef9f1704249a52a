"""When each computation of a program runs if messages take no time.

In:  a program, of which only the computation is looked at, and how long each takes.
Out: a `Span` for each; their end is the makespan.

For schedules before communication is added: bubbles in closed form are about these, and BPipe places its
transfers by them. `simulate` is the one that knows links and messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipeline.actions import Compute, Kind
from pipeline.dependencies import Result, needs, result_of
from pipeline.errors import ProgramError
from pipeline.program import Program

Durations = Callable[[Compute], float]


class Span(NamedTuple):
    """The action at a position of its rank's sequence, from `start` to `end`."""

    position: int
    action: Compute
    start: float
    end: float


def unit_durations(chunks: int = 1) -> Durations:
    """Forward 1, backward 2, each of its parts 1; divided by the chunks that a stage of 1 is cut into."""
    length = {Kind.BACKWARD: 2.0 / chunks}
    return lambda action: length.get(action.kind, 1.0 / chunks)


def timeline(program: Program, durations: Durations) -> tuple[tuple[Span, ...], ...]:
    """Spans of each rank, in order.

    Raises:
        ProgramError: The order can't be kept: some computation needs one that never comes before it.
    """
    layout = program.layout
    queues = [[(i, a) for i, a in enumerate(rank) if isinstance(a, Compute)] for rank in program.ranks]
    spans: list[list[Span]] = [[] for _ in queues]
    done: dict[Result, float] = {}
    free = [0.0] * len(queues)
    waiting: dict[Result, list[int]] = {}
    ready = list(range(len(queues)))
    while ready:
        r = ready.pop()
        while len(spans[r]) < len(queues[r]):
            i, action = queues[r][len(spans[r])]
            start = free[r]
            missing = None
            for result in needs(layout, action):
                if (end := done.get(result)) is None:
                    missing = result
                    break
                start = max(start, end)
            if missing is not None:
                waiting.setdefault(missing, []).append(r)
                break
            free[r] = start + durations(action)
            spans[r].append(Span(i, action, start, free[r]))
            if (made := result_of(action)) is not None:
                done[made] = free[r]
                ready += waiting.pop(made, ())
    for r, queue in enumerate(queues):
        if len(spans[r]) < len(queue):
            i, action = queue[len(spans[r])]
            raise ProgramError(f"rank {r}, index {i}: {action} can never start; what it needs is never made.")
    return tuple(map(tuple, spans))


def makespan(spans: tuple[tuple[Span, ...], ...]) -> float:
    """When the last computation ends."""
    return max(span.end for rank in spans for span in rank)


def bubble(spans: tuple[tuple[Span, ...], ...]) -> float:
    """Time that the busiest rank idles, as a share of the time that it works.

    Source: PTD-P, section 4.2.2, "bubble time fraction".
    """
    work = max(sum(span.end - span.start for span in rank) for rank in spans)
    return (makespan(spans) - work) / work
