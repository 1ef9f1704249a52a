"""Traces that differ in sizes only, as traces with symbolic sizes.

In:  the traces of a program.
Out: the same traces; where at least three do the same on tensors of other sizes, their sizes are
     expressions in symbols, so that merging makes one path of them, for all sizes.

Every size in such traces has to follow from what an iteration shows: dimensions of tensors from outside,
and numbers that Python passed. A group in which one does not stays as it is, a path for each size.
Sizes of zero and one take part only where traces had them, since PyTorch broadcasts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coexec.tracegraph.derivation import Column, Derivation, Found, Underived
from coexec.tracegraph.expressions import Expressions, Values
from coexec.tracegraph.lifting import lift
from coexec.tracegraph.numbers import same_number
from coexec.tracegraph.places import Place, numbers_in, outline, with_sizes
from coexec.tracegraph.sizes import Symbol, value_range
from coexec.tracegraph.trace import Event, Trace

#: Traces with different sizes before these become symbolic: two points fit too many expressions.
ENOUGH = 3
#: Numbers below this one are often dimensions, or sizes that are broadcast.
_SMALL = 2


@dataclass(frozen=True, slots=True)
class Generalized:
    """Traces, some of them with symbolic sizes.

    Attributes:
        traces: in the order in which they were given.
        symbols: what each symbol may be.
        assignments: for each trace, the value of each of its symbols.
        latest: whether the last trace is one of those with symbolic sizes.
    """

    traces: tuple[Trace, ...]
    symbols: tuple[Symbol, ...]
    assignments: tuple[tuple[tuple[int, int], ...], ...]
    latest: bool


def generalize(traces: Sequence[Trace]) -> Generalized:
    """Finds groups of traces that differ in sizes only, and makes these symbolic."""
    out = list(traces)
    names: dict[Hashable, int] = {}  # what each symbol is, in all groups
    assignments: list[dict[int, int]] = [{} for _ in traces]
    made_symbolic: list[list[int]] = []
    groups = _groups(traces)
    while groups:
        members = groups.pop()
        group = Group([traces[i] for i in members], names)
        made = group.symbolic()
        if made is None:
            groups += with_equal_small_numbers(traces, members)
            continue
        made_symbolic.append(members)
        for index, trace in zip(members, made, strict=True):
            out[index] = trace
        for position, index in enumerate(members):
            assignments[index] = {n: v[position] for n, v in group.symbols.items()}
    symbolic = [out[members[0]] for members in made_symbolic]
    for index, trace in enumerate(traces):
        if not any(index in members for members in made_symbolic):
            lifted = lift(trace, symbolic)
            if lifted is not None:
                out[index] = lifted[0]
                assignments[index] = lifted[1]
    values: dict[int, list[int]] = defaultdict(list)
    for assignment in assignments:
        for number, value in assignment.items():
            values[number].append(value)
    ranges = tuple(value_range(values[n]) if n in values else Symbol(0, -1) for n in range(len(names)))
    latest = any(members[-1] == len(traces) - 1 for members in made_symbolic)
    return Generalized(tuple(out), ranges, tuple(tuple(a.items()) for a in assignments), latest)


def _groups(traces: Sequence[Trace]) -> list[list[int]]:
    """The numbers of traces that have equal events but for sizes."""
    if len(traces) < ENOUGH:
        return []
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for index, trace in enumerate(traces):
        alike[tuple((e.location, len(e.operations)) for e in trace.events)].append(index)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for indices in alike.values():
        if len(indices) >= ENOUGH:
            for index in indices:
                groups[_outline(traces[index])].append(index)
    return [g for g in groups.values() if len(g) >= ENOUGH]


def with_equal_small_numbers(traces: Sequence[Trace], members: Sequence[int]) -> list[list[int]]:
    """Parts of a group in which sizes of zero and one, and dimensions, are the same."""
    parts: dict[Hashable, list[int]] = defaultdict(list)
    for index in members:
        small = tuple(_small(n) for event in traces[index].events for _, n in numbers_in(event))
        parts[small].append(index)
    return [p for p in parts.values() if len(p) >= ENOUGH] if len(parts) > 1 else []


def _small(number: Any) -> Any:
    return number if number.__class__ is int and number < _SMALL else None


def _outline(trace: Trace) -> Hashable:
    """A trace without its numbers."""
    return tuple(map(outline, trace.events))


class Group:
    """Traces with equal outlines."""

    def __init__(self, traces: Sequence[Trace], names: dict[Hashable, int], scope: Hashable = None) -> None:
        self.traces = traces
        self.names = names
        self.scope = scope
        self.symbols: dict[int, Values] = {}
        self.columns = [_columns(events) for events in zip(*(t.events for t in traces), strict=True)]
        self.varying = [[(p, v) for p, v in column if _differ(v)] for column in self.columns]

    def symbolic(self) -> list[Trace] | None:
        """The traces with symbolic sizes.

        None if the same sizes are in less than `ENOUGH` of them, or one does not follow from anything.
        """
        sizes = [v for column in self.varying for p, v in column if _is_size(p, v)]
        if len(set(zip(*sizes, strict=True))) < ENOUGH:
            return None
        promoted: set[tuple[int, int]] = set()  # numbers that are symbols
        while True:
            derivation = Derivation(self.traces, self.varying, promoted, dict(self.names), self.scope)
            try:
                found = derivation.run()
                break
            except Underived as underived:
                number = self._number_for(underived, promoted)
                if number is None:
                    return None
                promoted.add(number)
        self.names.update(derivation.names)
        self.symbols = derivation.symbols
        return [self._rebuilt(found, i) for i in range(len(self.traces))]

    def _number_for(self, underived: Underived, promoted: set[tuple[int, int]]) -> tuple[int, int] | None:
        """A number that Python passed at or before an event, and that would explain values in it."""
        for index in range(underived.event, -1, -1):
            for place, candidate in self.varying[index]:
                is_candidate = place.kind == "number" and candidate[0].__class__ is int
                if not is_candidate or (index, place.index) in promoted:
                    continue
                alone = Expressions()
                alone.add_symbol(0, candidate)
                if index == underived.event or alone.find(underived.values) is not None:
                    return index, place.index
        return None

    def _rebuilt(self, found: list[Found], member: int) -> Trace:
        trace = self.traces[member]
        events = []
        for event, column, sizes in zip(trace.events, self.columns, found, strict=True):
            if not sizes:
                events.append(event)
                continue
            left = {place: iter(values) for place, values in sizes.items()}
            replaced = [next(left[place]) if _differ(values) else None for place, values in column]
            offsets = [sizes.get(Place("offset", i, 0), [None])[0] for i in range(len(event.outputs))]
            events.append(with_sizes(event, replaced, offsets))
        return replace(trace, events=tuple(events))


def _columns(events: Sequence[Event]) -> list[Column]:
    rows = [numbers_in(event) for event in events]
    return [(cells[0][0], tuple([n for _, n in cells])) for cells in zip(*rows, strict=True)]


def _differ(values: tuple[Any, ...]) -> bool:
    first = values[0]
    return any(v is not first and not same_number(v, first) for v in values)


def _is_size(place: Place, values: tuple[Any, ...]) -> bool:
    return values[0].__class__ is int and place.kind not in ("number", "value")
