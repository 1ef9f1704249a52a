"""A single trace with the symbolic sizes of others.

In:  a trace, and traces with symbolic sizes.
Out: the trace with symbolic sizes, if it begins and ends as one of these does and what it has in between
     is nothing to which sizes matter: an iteration that logs a value, for instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coexec.tracegraph.numbers import same_number
from coexec.tracegraph.places import Place, numbers_in, outline, with_sizes
from coexec.tracegraph.sizes import Size, number_of, value_of
from coexec.tracegraph.tape import Passed
from coexec.tracegraph.trace import Event, Produced, Trace

Lifted = tuple[Trace, dict[int, int]]


def lift(trace: Trace, symbolic: Sequence[Trace]) -> Lifted | None:
    """The trace with the sizes of one of `symbolic`, and the values that their symbols have in it."""
    if not symbolic:
        return None
    outlines = [alone(e) for e in trace.events]
    for other in symbolic:
        pairs = _aligned(outlines, [alone(e) for e in other.events])
        lifted = _with_sizes_of(trace, other, pairs) if pairs else None
        if lifted is not None:
            return lifted
    return None


def alone(event: Event) -> Event:
    """The outline of an event, whatever events its arguments come from."""
    piece = replace(event.piece, of=0) if isinstance(event.piece, Passed) else event.piece
    return replace(outline(event), inputs=(), sources=(), piece=piece)


def _aligned(ours: Sequence[Event], theirs: Sequence[Event]) -> dict[int, int]:
    """For events at the beginning and at the end, the equal one of the other trace."""
    shortest = min(len(ours), len(theirs))
    first = 0
    while first < shortest and ours[first] == theirs[first]:
        first += 1
    last = 0
    while last < shortest - first and ours[-1 - last] == theirs[-1 - last]:
        last += 1
    pairs = {i: i for i in range(first)}
    pairs.update({len(ours) - 1 - i: len(theirs) - 1 - i for i in range(last)})
    return pairs


def _with_sizes_of(trace: Trace, other: Trace, pairs: dict[int, int]) -> Lifted | None:
    symbols: dict[int, int] = {}
    events: list[Event] = []
    numbers_differ = False  # in this event, or before it
    for index, event in enumerate(trace.events):
        if index not in pairs:
            if event.by_path or any(_is_symbolic(b, events) for b in event.inputs):
                return None
            events.append(event)
            continue
        like = other.events[pairs[index]]
        if _takes_symbolic(event, like, pairs):
            return None
        own = any(a != b for a, b in zip(event.numbers, like.numbers, strict=True) if not isinstance(b, Size))
        numbers_differ = numbers_differ or own
        sizes = _sizes(event, like, symbols, numbers_differ if event.backward else own)
        if sizes is None:
            return None
        offsets = []
        for mine, its in zip(event.outputs, like.outputs, strict=True):
            offset = its.meta.offset if isinstance(its.meta.offset, Size) else None
            if offset is not None and value_of(offset, symbols.get) != mine.meta.offset:
                return None
            offsets.append(offset)
        events.append(with_sizes(event, sizes, offsets))
    return (replace(trace, events=tuple(events)), symbols) if symbols else None


def _sizes(event: Event, like: Event, symbols: dict[int, int], fed: bool) -> list[Size | None] | None:
    """The sizes of another event, in the places of this one; None if the numbers do not agree.

    With `fed`, numbers of operations may differ because those that Python passed do.
    """
    out: list[Size | None] = []
    for (place, mine), (_, its) in zip(numbers_in(event), numbers_in(like), strict=True):
        if not isinstance(its, Size):
            if not same_number(mine, its) and not (
                place.kind == "number" or (fed and _may_be_fed(place, mine))
            ):
                return None
            out.append(None)
            continue
        symbol = number_of(its)
        if symbol is not None and symbol not in symbols:
            symbols[symbol] = mine
        elif value_of(its, symbols.get) != mine:
            return None
        out.append(its)
    return out


def _may_be_fed(place: Place, value: Any) -> bool:
    return place.kind == "value" or isinstance(value, float)


def _takes_symbolic(event: Event, like: Event, pairs: dict[int, int]) -> bool:
    """Whether an event takes a tensor of symbolic sizes from one that is not among the pairs."""
    key: Any = like.key
    return any(
        isinstance(binding, Produced) and binding.event not in pairs and m.is_symbolic
        for binding, m in zip(event.inputs, key[2], strict=False)
    )


def _is_symbolic(binding: object, events: Sequence[Event]) -> bool:
    if not isinstance(binding, Produced):
        return False
    return events[binding.event].outputs[binding.output].meta.is_symbolic
