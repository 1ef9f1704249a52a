"""Calls that differ in sizes only, in whatever traces and rounds of loops they are.

In:  the traces of a program whose backward passes are in pieces.
Out: the same traces; where at least three calls at one place do the same on tensors of other sizes, the sizes
     of these calls, and of the pieces of the backward pass through them, are expressions in symbols of their
     own.

`coexec.tracegraph.generalize` compares whole traces, so it has nothing to say of a loop that has another
number of rounds in each iteration, or other branches. Here, every size of a call has to follow from its own
arguments: the dimensions of its tensors and the numbers that Python passed. How the sizes of calls depend on
each other is left to `coexec.tracegraph.own_sizes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from coexec.tracegraph.derivation import external_of
from coexec.tracegraph.expressions import Values
from coexec.tracegraph.generalize import ENOUGH, Group, with_equal_small_numbers
from coexec.tracegraph.lifting import alone
from coexec.tracegraph.numbers import are_those
from coexec.tracegraph.places import numbers_in
from coexec.tracegraph.sizes import Symbol, value_range
from coexec.tracegraph.tape import Passed
from coexec.tracegraph.trace import Constant, Event, External, ExternalTensor, Input, Produced, Trace

#: For events: the value of each of their symbols.
Assignments = dict[int, dict[int, int]]

_MADE = Constant(torch.empty(0))  # stands for memory that the iteration has made


@dataclass(frozen=True, slots=True)
class GeneralCalls:
    """Traces in which some calls have symbolic sizes.

    Attributes:
        traces: in the order in which they were given.
        symbols: what each symbol may be.
        assignments: for each trace, the values that the symbols of its calls, and of their pieces, have.
    """

    traces: tuple[Trace, ...]
    symbols: tuple[Symbol, ...]
    assignments: tuple[Assignments, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    """What matters of an event when it is compared with others.

    Attributes:
        outline: a number for what it is without its numbers and its arguments.
        numbers: all of them, and where its tensors begin in their memory.
    """

    outline: int
    numbers: Hashable


class Looks:
    """Events that have been looked at, and what has been made of them; those of earlier merges come again.

    They are found by their ids, which are their own as long as they are kept here.

    Attributes:
        names: the number of each symbol.
        groups: for each place and outline, what was found of the calls there when they were these.
    """

    def __init__(self) -> None:
        self.names: dict[Hashable, int] = {}
        self.groups: dict[Hashable, tuple[list[Event], list[_Symbolic]]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._places: dict[int, tuple[Event, int, int]] = {}
        self._known: dict[int, tuple[Event, _Look]] = {}
        self._scopes: dict[Hashable, object] = {}
        self._symbolic: dict[int, tuple[Event, Event]] = {}
        self._made: dict[int, tuple[Event, object, Event]] = {}

    def place(self, trace: Trace, number: int) -> tuple[int, int]:
        """Numbers for the place and for the sizes of a call."""
        event = trace.events[number]
        known = self._places.get(id(event))
        if known is None:
            place, sizes = self._number(_place(event, trace)), self._number(_sizes(event))
            known = self._places[id(event)] = (event, place, sizes)
        return known[1:]

    def _number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def of(self, trace: Trace, number: int) -> _Look:
        """What an event of a trace looks like."""
        event = trace.events[number]
        known = self._known.get(id(event))
        if known is None:
            known = self._known[id(event)] = (event, self._new(trace, number, event))
        return known[1]

    def scope(self, where: Hashable, *, new: bool = False) -> object:
        """In what the symbols of calls have their names, which earlier merges gave them, too."""
        if new or where not in self._scopes:
            self._scopes[where] = object()
        return self._scopes[where]

    def symbolic(self, event: Event, made: Event) -> Event:
        """What has been made of an event with symbols: the very object of an earlier merge if it is equal."""
        known = self._symbolic.get(id(event))
        if known is None or known[1] != made:
            known = self._symbolic[id(event)] = (event, made)
        return known[1]

    def in_place(self, event: Event, of: object, make: Callable[[], Event]) -> Event:
        """What comes in the place of an event, which depends on it and on something else."""
        known = self._made.get(id(event))
        if known is None or not (known[1] is of or known[1] == of):
            known = self._made[id(event)] = (event, of, make())
        return known[2]

    def _new(self, trace: Trace, number: int, event: Event) -> _Look:
        outside = [external_of(trace, number, o.value) for o in event.outputs]
        starts = [None if e is None else trace.externals[e].meta.offset for e in outside]
        outline = (alone(event), tuple([e is not None for e in outside]))
        numbers = (
            tuple([n if n.__class__ is int else repr(n) for _, n in numbers_in(event)]),  # -0.0 is not 0.0
            tuple([(o.meta.offset, o.kept) for o in event.outputs]),
            tuple(starts),
        )
        return _Look(self._number(outline), numbers)


@dataclass(frozen=True, slots=True)
class _Call:
    """An event, and the pieces of backward passes that go through it."""

    trace: int
    event: int
    pieces: list[int]


def generalize_calls(traces: Sequence[Trace], looks: Looks) -> GeneralCalls:
    """Finds calls that differ in sizes only, and makes these symbolic."""
    events = [list(t.events) for t in traces]
    assignments: list[Assignments] = [{} for _ in traces]
    values: dict[int, list[int]] = defaultdict(list)
    for place, calls in _alike(traces, looks):
        for alike in _symbolic_calls(traces, place, calls, looks):
            pieces = _symbolic_pieces(traces, alike, looks)
            for member, call in enumerate(alike.calls):
                sizes = alike.symbols(member)
                for number, value in sizes.items():
                    values[number].append(value)
                here, of_trace = events[call.trace], assignments[call.trace]
                here[call.event] = _as_in(here[call.event], alike.made(member), looks)
                of_trace[call.event] = sizes
                for event in call.pieces:
                    piece = pieces.get((call.trace, event))
                    if piece is None:
                        here[event] = _at(here[event], sizes, looks)
                    else:
                        here[event] = _as_in(here[event], piece, looks)
                        of_trace[event] = sizes
    symbols = range(max(values, default=-1) + 1)  # some are only in earlier merges
    return GeneralCalls(
        tuple([replace(t, events=tuple(e)) for t, e in zip(traces, events, strict=True)]),
        tuple([value_range(values[n]) if n in values else Symbol(0, -1) for n in symbols]),
        tuple(assignments),
    )


# --- calls ---


@dataclass(frozen=True, slots=True)
class _Symbolic:
    """Calls with the same expressions.

    Attributes:
        chosen: their numbers among all that were looked at.
        scope: in which their symbols have names.
        symbols: the values of these in each of the calls.
        events: the calls with symbolic sizes.
    """

    chosen: list[int]
    scope: Hashable
    symbols: dict[int, Values]
    events: list[Event]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Calls with the same expressions: several may be the same, of which one has been looked at.

    Attributes:
        calls: all of them.
        of: for each of them, its number among those that were looked at.
        symbolic: these.
    """

    calls: list[_Call]
    of: list[int]
    symbolic: _Symbolic

    def symbols(self, member: int) -> dict[int, int]:
        """The values of the symbols in a call."""
        return {number: values[self.of[member]] for number, values in self.symbolic.symbols.items()}

    def made(self, member: int) -> Event:
        """A call with symbolic sizes."""
        return self.symbolic.events[self.of[member]]


def _alike(traces: Sequence[Trace], looks: Looks) -> list[tuple[Hashable, list[_Call]]]:
    """Calls with equal outlines, and their place, if their sizes are not all the same."""
    by_place: dict[int, list[_Call]] = defaultdict(list)
    sizes: dict[int, set[int]] = defaultdict(set)
    for number, trace in enumerate(traces):
        calls: dict[int, _Call] = {}
        for index, event in enumerate(trace.events):
            if isinstance(event.piece, Passed):
                calls[event.piece.of].pieces.append(index)
            else:
                calls[index] = _Call(number, index, [])
                place, its_sizes = looks.place(trace, index)
                by_place[place].append(calls[index])
                sizes[place].add(its_sizes)
    groups: dict[Hashable, list[_Call]] = defaultdict(list)
    for place, calls_there in by_place.items():
        if len(calls_there) >= ENOUGH and len(sizes[place]) > 1:
            for call in calls_there:
                groups[place, looks.of(traces[call.trace], call.event).outline].append(call)
    return [(where, calls) for where, calls in groups.items() if len(calls) >= ENOUGH]


def _place(event: Event, trace: Trace) -> Hashable:
    """Where a call stands, and the parameters that it has: layers have other sizes than each other."""
    externals = [trace.externals[b.index] for b in event.inputs if isinstance(b, External)]
    own = tuple([e.uid for e in externals if e.parameter])
    return event.function, event.location, event.kind, len(event.operations), own


def _sizes(event: Event) -> Hashable:
    numbers = tuple([n for n in event.numbers if n.__class__ is int])
    return event.key[2], numbers, tuple([o.meta for o in event.outputs])  # type: ignore[index]  # of the recorder


def _symbolic_calls(
    traces: Sequence[Trace], place: Hashable, calls: list[_Call], looks: Looks
) -> Iterator[_Alike]:
    """Calls that have the same expressions; each group has symbols of its own."""
    different: dict[Hashable, list[int]] = defaultdict(list)
    for member, call in enumerate(calls):
        different[looks.of(traces[call.trace], call.event).numbers].append(member)
    members = list(different.values())
    looked_at = [calls[m[0]] for m in members]
    events = [traces[c.trace].events[c.event] for c in looked_at]
    known = looks.groups.get(place)
    if known is None or not are_those(known[0], events):
        alone = [_alone(traces[c.trace], c.event) for c in looked_at]
        known = looks.groups[place] = events, list(_groups(alone, events, place, looks))
    for symbolic in known[1]:
        of = [(calls[m], position) for position, i in enumerate(symbolic.chosen) for m in members[i]]
        yield _Alike([c for c, _ in of], [p for _, p in of], symbolic)


def _groups(
    alone: Sequence[Trace], events: Sequence[Event], place: Hashable, looks: Looks
) -> Iterator[_Symbolic]:
    """Parts of some calls that have the same expressions."""
    waiting = [list(range(len(alone)))]
    number = 0
    while waiting:
        chosen = waiting.pop()
        traces, where = [alone[i] for i in chosen], (place, number)
        group = Group(traces, looks.names, looks.scope(where))
        made = group.symbolic()
        if made is None:
            waiting += with_equal_small_numbers(alone, chosen)
            continue
        if list(group.symbols) != sorted(group.symbols):  # one of them was none in earlier merges
            group = Group(traces, looks.names, looks.scope(where, new=True))
            made = group.symbolic()
            assert made is not None
        of_calls = [looks.symbolic(events[i], t.events[0]) for i, t in zip(chosen, made, strict=True)]
        yield _Symbolic(chosen, group.scope, group.symbols, of_calls)
        number += 1


def _alone(trace: Trace, number: int) -> Trace:
    """A trace of one event, all of whose arguments come from outside."""
    event = trace.events[number]
    inputs = tuple([None if b is None else External(i) for i, b in enumerate(event.inputs)])
    return _of_events(trace, [number], [replace(event, inputs=inputs)])


def _of_events(trace: Trace, numbers: Sequence[int], events: Sequence[Event]) -> Trace:
    """A trace of some events of another one, whose sources are from outside or on the iteration's memory."""
    externals: list[ExternalTensor] = []
    made = []
    for number, event in zip(numbers, events, strict=True):
        sources: list[External | Constant] = []
        for index in range(len(event.sources)):
            external = external_of(trace, number, Input(index))
            if external is None:
                sources.append(_MADE)
            else:
                sources.append(External(len(externals)))
                externals.append(trace.externals[external])
        made.append(replace(event, sources=tuple(sources)))
    return Trace(tuple(made), tuple(externals))


def _as_in(event: Event, made: Event, looks: Looks) -> Event:
    """An event of a trace with the symbolic sizes of one that looks like it."""

    def make() -> Event:
        both = zip(made.outputs, event.outputs, strict=True)
        outputs = tuple([replace(new, kept=own.kept, uid=own.uid) for new, own in both])
        return replace(made, inputs=event.inputs, sources=event.sources, piece=event.piece, outputs=outputs)

    return looks.in_place(event, made, make)


# --- pieces ---


def _at(event: Event, symbols: Mapping[int, int], looks: Looks) -> Event:
    """A piece with the sizes of a trace, for calls that have these."""
    at, piece = tuple(sorted(symbols.items())), event.piece
    assert isinstance(piece, Passed)
    return looks.in_place(event, at, lambda: replace(event, piece=replace(piece, at=at)))


def _symbolic_pieces(traces: Sequence[Trace], alike: _Alike, looks: Looks) -> dict[tuple[int, int], Event]:
    """By trace and event the pieces of symbolic calls, in the symbols of the calls.

    A piece is looked at together with its call. If there are enough of one kind, the call gets the very
    expressions that it has among all calls.
    """
    forms: dict[int, dict[Hashable, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for member, call in enumerate(alike.calls):
        for event in call.pieces:
            look = looks.of(traces[call.trace], event)
            forms[look.outline][alike.of[member], look.numbers].append((member, event))
    found: dict[tuple[int, int], Event] = {}
    for form in forms.values():
        same = list(form.values())
        pairs = []
        for member, event in (s[0] for s in same):
            call = alike.calls[member]
            pairs.append(_with_piece(traces[call.trace], call.event, event))
        waiting = [list(range(len(same)))]
        while waiting:
            chosen = waiting.pop()
            together = Group([pairs[i] for i in chosen], looks.names, alike.symbolic.scope)
            symbolic = together.symbolic()
            if symbolic is None or not together.symbols.keys() <= alike.symbolic.symbols.keys():
                waiting += with_equal_small_numbers(pairs, chosen)
                continue
            for i, pair in zip(chosen, symbolic, strict=True):
                member, event = same[i][0]
                if _is_same(pair.events[0], alike.made(member)):
                    piece = looks.symbolic(traces[alike.calls[member].trace].events[event], pair.events[1])
                    found |= {(alike.calls[m].trace, event): piece for m, event in same[i]}
    return found


def _is_same(event: Event, other: Event) -> bool:
    """Whether two events have the same expressions, whatever tensors they are applied to."""
    others = zip(event.outputs, other.outputs, strict=True)
    outputs = tuple([replace(its, kept=mine.kept, uid=mine.uid) for mine, its in others])
    return event == replace(other, sources=event.sources, outputs=outputs)


def _with_piece(trace: Trace, call: int, piece: int) -> Trace:
    """A trace of a call and a piece of the backward pass through it."""
    event = trace.events[piece]
    inputs = tuple([None if b is None else Produced(0, 0) for b in event.inputs])
    first = _alone(trace, call).events[0]
    return _of_events(trace, [call, piece], [first, replace(event, inputs=inputs)])
