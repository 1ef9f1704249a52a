"""Timeline: what both runners did during a few iterations.

In:  raw spans of the runners' threads, which may overlap or touch.
Out: for each lane disjoint spans in order, each of execution or of a stall.

Source: the breakdown of a step into execution and stall of both runners is Terra's (section 3.3.2,
figure 3.11); here it keeps its place in time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A wait that is shorter has found what it waited for.
SHORTEST_STALL_S = 2e-6
#: Between two executions without a wait, a gap that is shorter is what executing costs beside the calls.
OVERHEAD_S = 1e-4


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one lane.

    Attributes:
        begin_s, end_s: seconds since the profile's first iteration began.
        stalled: whether the runner waited for the other one; else it computed.
        name: what it waited for or computed.
    """

    begin_s: float
    end_s: float
    stalled: bool
    name: str

    @property
    def length_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class IterationSpan:
    """One iteration.

    Attributes:
        key: the program.
        number: how many iterations of the program went before.
        phase: `tracing`, `co-execution`, `dynamic`, `fallback` or `eager`.
        begin_s: when Python entered the block.
        left_s: when it had left it; results may be pending then.
    """

    key: str
    number: int
    phase: str
    begin_s: float
    left_s: float

    @property
    def title(self) -> str:
        """A name for a person."""
        return f"iteration {self.number}: {self.phase}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """All lanes of a profile.

    Attributes:
        iterations: in order.
        python: the PythonRunner's lane. Execution is all that Python does in the blocks except waiting;
            between blocks there are only stalls.
        graph: the GraphRunner's lane of each program, by its key.
    """

    iterations: tuple[IterationSpan, ...]
    python: tuple[Span, ...]
    graph: dict[str, tuple[Span, ...]]

    def summary(self) -> str:
        """Milliseconds of execution and stall an iteration, of both runners, as text."""
        lines = []
        for key in dict.fromkeys(i.key for i in self.iterations):
            mine = [i for i in self.iterations if i.key == key]
            lines.append(
                f"program {key}: {len(mine)} iterations ({', '.join(dict.fromkeys(i.phase for i in mine))})"
            )
            lanes = {"PythonRunner": self.python, "GraphRunner": self.graph.get(key, ())}
            for name, spans in lanes.items():
                execution, stall = (
                    statistics.median(self._within(spans, i, stalled) * 1e3 for i in mine)
                    for stalled in (False, True)
                )
                lines.append(f"  {name}: {execution:.2f} ms exec, {stall:.2f} ms stall (medians)")
        return "\n".join(lines)

    def _within(self, spans: Sequence[Span], iteration: IterationSpan, stalled: bool) -> float:
        """Seconds of a lane from an iteration's begin to the next one's."""
        later = [i.begin_s for i in self.iterations if i.begin_s > iteration.begin_s]
        end = min(later, default=float("inf"))
        return sum(s.length_s for s in spans if s.stalled == stalled and iteration.begin_s <= s.begin_s < end)


def lane(executions: Iterable[Span], stalls: Iterable[Span]) -> tuple[Span, ...]:
    """One lane: the stalls, and the executions where no stall is; neighbours of one name are joined."""
    waits = _joined((s for s in stalls if s.length_s >= SHORTEST_STALL_S), SHORTEST_STALL_S)
    out = list(waits)
    for execution in _joined(executions, OVERHEAD_S):
        begin = execution.begin_s
        for wait in waits:
            if wait.end_s <= begin or wait.begin_s >= execution.end_s:
                continue
            if wait.begin_s > begin:
                out.append(Span(begin, wait.begin_s, False, execution.name))
            begin = wait.end_s
        if begin < execution.end_s:
            out.append(Span(begin, execution.end_s, False, execution.name))
    return tuple(sorted(out, key=lambda s: s.begin_s))


def clipped(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> list[Span]:
    """The parts of spans that lie in one of the windows (begin and end in seconds)."""
    return [
        Span(max(s.begin_s, begin), min(s.end_s, end), s.stalled, s.name)
        for s in spans
        for begin, end in windows
        if s.begin_s < end and s.end_s > begin
    ]


def _joined(spans: Iterable[Span], gap_s: float) -> list[Span]:
    out: list[Span] = []
    for span in sorted(spans, key=lambda s: s.begin_s):
        if out and out[-1].name == span.name and span.begin_s - out[-1].end_s < gap_s:
            last = out.pop()
            span = Span(last.begin_s, max(last.end_s, span.end_s), span.stalled, span.name)
        out.append(span)
    return out
