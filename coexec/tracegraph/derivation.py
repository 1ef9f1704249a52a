"""Where each size comes from.

In:  traces with equal events but for numbers, and the places in which their numbers differ.
Out: for each of these places an expression in symbols; symbols are what an iteration shows: dimensions of
     tensors from outside, numbers that Python passed, and sizes that values decided about.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from coexec.tracegraph.expressions import Expressions, Values
from coexec.tracegraph.numbers import TRANSFORMS, same_number
from coexec.tracegraph.places import Place
from coexec.tracegraph.sizes import Size, fixed, symbols_in
from coexec.tracegraph.trace import Computed, Event, External, Input, Local, Trace

Column = tuple[Place, tuple[Any, ...]]  # a place, and what each trace has there
Found = dict[Place, list[Size | int | None]]  # the expressions of a place that varies; None keeps a number


class Underived(Exception):
    """A number follows from nothing that an iteration shows."""

    def __init__(self, event: int, values: Values) -> None:
        super().__init__(event, values)
        self.event = event
        self.values = values


class Derivation:
    """Finds expressions for all places that vary.

    `promoted` numbers of Python are symbols. In another `scope`, the same places have other symbols.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        varying: Sequence[Sequence[Column]],
        promoted: set[tuple[int, int]],
        names: dict[Hashable, int],
        scope: Hashable = None,
    ) -> None:
        self.traces = traces
        self.scope = scope
        self.varying = varying
        self.promoted = promoted
        self.names = names
        self.symbols: dict[int, Values] = {}
        self._expressions = Expressions()
        self._fed: list[tuple[Any, ...]] = []  # numbers that are no sizes, of all events so far

    def run(self) -> list[Found]:
        """The expressions of each event.

        Raises:
            Underived: if a place has none.
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
                name = (self.scope, identity, occurrences[identity], place)
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
                    raise Underived(index, values)  # it would be known too late
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
            raise Underived(event, values)
        return self._size(event, values)

    def _new_size(self, values: Values, name: Hashable) -> Size | int:
        size = self._expressions.find(values) if self._expressions.is_multiple(values) else None
        return self._symbol(name, values) if size is None else size

    def _size(self, event: int, values: Values) -> Size | int:
        size = self._expressions.find(values)
        if size is None:
            raise Underived(event, values)
        return size

    def _symbol(self, name: Hashable, values: Values) -> Size:
        number = self.names.setdefault(name, len(self.names))
        self.symbols[number] = values
        return self._expressions.add_symbol(number, values)

    def _offsets(self, index: int) -> Found:
        """Where in their memory outputs begin, which Python may see of those that it keeps.

        Views of external tensors may be rebased, by as much in each trace.
        """
        out: Found = {}
        events = [t.events[index] for t in self.traces]
        for number, output in enumerate(events[0].outputs):
            offsets = fixed(e.outputs[number].meta.offset for e in events)
            external = external_of(self.traces[0], index, output.value)
            kept = any(e.outputs[number].kept for e in events)
            if external is None:
                size = self._size(index, offsets) if kept else self._expressions.find(offsets)
                if isinstance(size, Size):
                    out[Place("offset", number, 0)] = [size]
            elif kept:
                starts = fixed(t.externals[external].meta.offset for t in self.traces)
                if len({o - s for o, s in zip(offsets, starts, strict=True)}) > 1:
                    raise Underived(index, offsets)
        return out


def _is_new(event: Event, place: Place, known: set[int]) -> bool:
    """Whether a size is one of a tensor that comes from outside here."""
    if place.kind not in ("input shape", "input stride"):
        return False
    binding = event.inputs[place.index]
    return isinstance(binding, External) and binding.index not in known


def external_of(trace: Trace, event: int, value: Input | Local) -> int | None:
    """The external tensor whose memory a value is a view of; None for memory of the iteration."""
    while True:
        if isinstance(value, Input):
            source = trace.origin(trace.events[event].sources[value.index])
            if isinstance(source, External):
                return source.index
            if not isinstance(source, Computed):
                return None
            event, value = source.event, Local(source.operation, source.result)
        result = trace.events[event].operations[value.operation].results[value.result]
        if result is None or result.alias is None:
            return None
        value = result.alias
