"""Traces that differ in sizes only, as traces with symbolic sizes.

In:  the traces of a program.
Out: the same traces; where at least three do the same on tensors of other sizes, their sizes are
     expressions in symbols, so that merging makes one path of them, for all sizes.

Every size in such traces has to follow from what an iteration shows: dimensions of tensors from outside,
and numbers that Python passed. A group in which one does not stays as it is, a path for each size.
Sizes of zero and one take part only where traces had them, since PyTorch broadcasts them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coexec.tracegraph.lifting import lift
from coexec.tracegraph.numbers import TRANSFORMS, same_number
from coexec.tracegraph.places import Place, numbers_in, outline, with_sizes
from coexec.tracegraph.sizes import Expressions, Size, Symbol, Values, fixed, symbols_in, value_range
from coexec.tracegraph.trace import Computed, Event, External, Input, Local, Trace

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
        latest: whether the last trace is one of those with symbolic sizes.
    """

    traces: tuple[Trace, ...]
    symbols: tuple[Symbol, ...]
    latest: bool


def generalize(traces: Sequence[Trace]) -> Generalized:
    """Finds groups of traces that differ in sizes only, and makes these symbolic."""
    out = list(traces)
    names: dict[Hashable, int] = {}  # what each symbol is, in all groups
    values: dict[int, list[int]] = defaultdict(list)
    made_symbolic: list[list[int]] = []
    groups = _groups(traces)
    while groups:
        members = groups.pop()
        group = _Group([traces[i] for i in members], names)
        made = group.symbolic()
        if made is None:
            groups += _with_equal_small_numbers(traces, members)
            continue
        made_symbolic.append(members)
        for index, trace in zip(members, made, strict=True):
            out[index] = trace
        for number, seen in group.symbols.items():
            values[number] += seen
    symbolic = [out[members[0]] for members in made_symbolic]
    for index, trace in enumerate(traces):
        if not any(index in members for members in made_symbolic):
            lifted = lift(trace, symbolic)
            if lifted is not None:
                out[index], seen_values = lifted
                for number, value in seen_values.items():
                    values[number].append(value)
    ranges = tuple(value_range(values[n]) if n in values else Symbol(0, -1) for n in range(len(names)))
    latest = any(members[-1] == len(traces) - 1 for members in made_symbolic)
    return Generalized(tuple(out), ranges, latest)


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


def _with_equal_small_numbers(traces: Sequence[Trace], members: Sequence[int]) -> list[list[int]]:
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


# --- one group ----------------------------------------------------------------------------------

Column = tuple[Place, tuple[Any, ...]]  # a place, and what each trace has there
Found = dict[Place, list[Size | int | None]]  # the expressions of a place that varies; None keeps a number


class _Unexplained(Exception):
    """A number follows from nothing that an iteration shows."""

    def __init__(self, event: int, values: Values) -> None:
        super().__init__(event, values)
        self.event = event
        self.values = values


class _Group:
    """Traces with equal outlines."""

    def __init__(self, traces: Sequence[Trace], names: dict[Hashable, int]) -> None:
        self.traces = traces
        self.names = names
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
            attempt = _Attempt(self.traces, self.varying, promoted, dict(self.names))
            try:
                found = attempt.explain()
                break
            except _Unexplained as unexplained:
                number = self._number_for(unexplained, promoted)
                if number is None:
                    return None
                promoted.add(number)
        self.names.update(attempt.names)
        self.symbols = attempt.symbols
        return [self._rebuilt(found, i) for i in range(len(self.traces))]

    def _number_for(
        self, unexplained: _Unexplained, promoted: set[tuple[int, int]]
    ) -> tuple[int, int] | None:
        """A number that Python passed at or before an event, and that would explain values in it."""
        for index in range(unexplained.event, -1, -1):
            for place, candidate in self.varying[index]:
                is_candidate = place.kind == "number" and candidate[0].__class__ is int
                if not is_candidate or (index, place.index) in promoted:
                    continue
                alone = Expressions()
                alone.add_symbol(0, candidate)
                if index == unexplained.event or alone.find(unexplained.values) is not None:
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


# --- expressions --------------------------------------------------------------------------------


class _Attempt:
    """Expressions for all places that vary, when some numbers of Python are symbols."""

    def __init__(
        self,
        traces: Sequence[Trace],
        varying: Sequence[Sequence[Column]],
        promoted: set[tuple[int, int]],
        names: dict[Hashable, int],
    ) -> None:
        self.traces = traces
        self.varying = varying
        self.promoted = promoted
        self.names = names
        self.symbols: dict[int, Values] = {}
        self._expressions = Expressions()
        self._fed: list[tuple[Any, ...]] = []  # numbers that are no sizes, of all events so far

    def explain(self) -> list[Found]:
        """The expressions of each event.

        Raises:
            _Unexplained: if a place has none.
        """
        occurrences: Counter[Hashable] = Counter()
        known: set[int] = set()  # external tensors that earlier events have used
        found = []
        for index, event in enumerate(self.traces[0].events):
            identity = (event.function, event.location)
            occurrences[identity] += 1
            before = len(self._fed)
            asked: set[int] = set()  # symbols that only the result of this event shows
            shaped = not event.backward and any(o.shaped_by_data for o in event.operations)
            by_place: Found = defaultdict(list)
            for place, values in self.varying[index]:
                name = (identity, occurrences[identity], place)
                candidates = self._fed if event.backward else self._fed[before:]
                if place.kind == "number":
                    size = self._number(index, place, values, name)
                elif values[0].__class__ is float or place.kind == "value":
                    size = self._value(index, values, candidates)
                elif _is_new(event, place, known):
                    size = self._new_size(values, name)
                elif shaped and place.kind.startswith("result"):
                    size = self._expressions.find(values)
                    if size is None:
                        size = self._symbol(name, values)
                        asked |= symbols_in(size)
                else:
                    size = self._size(index, values)
                if place.kind in ("argument", "value") and asked & symbols_in(size):
                    raise _Unexplained(index, values)  # it would be known too late
                by_place[place].append(size)
            known |= {b.index for b in event.inputs if isinstance(b, External)}
            by_place.update(self._offsets(index))
            found.append(by_place)
        return found

    def _number(self, event: int, place: Place, values: tuple[Any, ...], name: Hashable) -> Size | int | None:
        size = self._expressions.find(values) if values[0].__class__ is int else None
        if size is None and (event, place.index) in self.promoted:
            return self._symbol(name, values)
        if size is None:
            self._fed.append(values)
        return size

    def _value(
        self, event: int, values: tuple[Any, ...], fed: Sequence[tuple[Any, ...]]
    ) -> Size | int | None:
        for transform in TRANSFORMS.values():
            for candidate in fed:
                if all(same_number(transform(c), v) for c, v in zip(candidate, values, strict=True)):
                    return None
        if values[0].__class__ is float:
            raise _Unexplained(event, values)
        return self._size(event, values)

    def _new_size(self, values: Values, name: Hashable) -> Size | int:
        size = self._expressions.find(values) if self._expressions.is_multiple(values) else None
        return self._symbol(name, values) if size is None else size

    def _size(self, event: int, values: Values) -> Size | int:
        size = self._expressions.find(values)
        if size is None:
            raise _Unexplained(event, values)
        return size

    def _symbol(self, name: Hashable, values: Values) -> Size:
        number = self.names.setdefault(name, len(self.names))
        self.symbols[number] = values
        return self._expressions.add_symbol(number, values)

    def _offsets(self, index: int) -> Found:
        """Where in their memory outputs begin, which Python may see.

        Views of external tensors may be rebased, by as much in each trace.
        """
        out: Found = {}
        events = [t.events[index] for t in self.traces]
        for number, output in enumerate(events[0].outputs):
            offsets = fixed(e.outputs[number].meta.offset for e in events)
            external = _external_of(self.traces[0], index, output.value)
            if external is None:
                size = self._size(index, offsets)
                if isinstance(size, Size):
                    out[Place("offset", number, 0)] = [size]
            elif any(e.outputs[number].kept for e in events):
                starts = fixed(t.externals[external].meta.offset for t in self.traces)
                if len({o - s for o, s in zip(offsets, starts, strict=True)}) > 1:
                    raise _Unexplained(index, offsets)
        return out


def _is_new(event: Event, place: Place, known: set[int]) -> bool:
    """Whether a size is one of a tensor that comes from outside here."""
    if place.kind not in ("input shape", "input stride"):
        return False
    binding = event.inputs[place.index]
    return isinstance(binding, External) and binding.index not in known


def _external_of(trace: Trace, event: int, value: Input | Local) -> int | None:
    """The external tensor whose memory a value is a view of; None for memory of the iteration."""
    while True:
        if isinstance(value, Input):
            source = trace.events[event].sources[value.index]
            if isinstance(source, External):
                return source.index
            if not isinstance(source, Computed):
                return None
            event, value = source.event, Local(source.operation, source.result)
        result = trace.events[event].operations[value.operation].results[value.result]
        if result is None or result.alias is None:
            return None
        value = result.alias
