"""How the numbers of an event reach its operations.

A learning rate that changes is not another program: it is fed. Whether an operation's number follows
from the event's number is decided by comparing two traces in which it differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coexec.tracegraph.graph import FedNumber, NumberSlot
from coexec.tracegraph.trace import Number, Operation

#: What PyTorch's composite operations do to a number on its way to the kernel.
TRANSFORMS: dict[str, Callable[[Number], Number]] = {
    "x": lambda x: x,
    "-x": lambda x: -x,
    "1 - x": lambda x: 1 - x,
    "1 / x": lambda x: 1 / x if x else math.nan,
    "float(x)": float,
}


def same_number(a: Number, b: Number) -> bool:
    """Equality that keeps 0.0 from -0.0 and takes nan for itself."""
    if a != a:
        return b != b
    return a == b and (a != 0 or math.copysign(1.0, a) == math.copysign(1.0, b))


def _leaves(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from _leaves(x, y)
    else:
        yield a, b


def is_number(value: Any) -> bool:
    """Whether a value is a number that could be fed (a bool is not)."""
    return value.__class__ is float or value.__class__ is int


def unify(
    node_operations: Sequence[Operation],
    node_slots: Sequence[NumberSlot],
    operations: Sequence[Operation],
    numbers: Sequence[Number],
    number_class: Callable[[Number], Any],
) -> tuple[tuple[Operation, ...], tuple[NumberSlot, ...]] | None:
    """Generalises a node's operations and numbers so that they also describe another trace's event.

    Returns:
        Operations in which varying numbers are `FedNumber`s, and the slots; None when the operations
        differ in anything else, or in numbers that no known transform explains.
    """
    if len(node_operations) != len(operations):
        return None
    differs = [
        slot.classes is not None or not same_number(slot.value, number)
        for slot, number in zip(node_slots, numbers, strict=True)
    ]
    unified = []
    for ours, theirs in zip(node_operations, operations, strict=True):
        if ours.target is not theirs.target or (ours.results, ours.writes) != (theirs.results, theirs.writes):
            return None
        args = _unify_args(ours.args, theirs.args, node_slots, numbers, differs)
        if args is _UNEXPLAINED:
            return None
        unified.append(Operation(ours.target, args, ours.results, ours.writes, ours.random))
    slots = []
    for slot, number, differ in zip(node_slots, numbers, differs, strict=True):
        if differ:
            classes = slot.classes or frozenset({number_class(slot.value)})
            slots.append(NumberSlot(slot.value, classes | {number_class(number)}))
        else:
            slots.append(slot)
    return tuple(unified), tuple(slots)


_UNEXPLAINED = object()


def _unify_args(
    ours: Any, theirs: Any, slots: Sequence[NumberSlot], numbers: Sequence[Number], differs: Sequence[bool]
) -> Any:
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        items = [_unify_args(a, b, slots, numbers, differs) for a, b in zip(ours, theirs, strict=True)]
        return _UNEXPLAINED if any(i is _UNEXPLAINED for i in items) else tuple(items)
    if isinstance(ours, FedNumber):
        fits = is_number(theirs) and same_number(TRANSFORMS[ours.transform](numbers[ours.slot]), theirs)
        return ours if fits else _UNEXPLAINED
    if is_number(ours) and ours.__class__ is theirs.__class__:
        if same_number(ours, theirs):
            return ours
        for index, differ in enumerate(differs):
            for name, function in TRANSFORMS.items():
                if (
                    differ
                    and _exactly(function(slots[index].value), ours)
                    and _exactly(function(numbers[index]), theirs)
                ):
                    return FedNumber(index, name)
        return _UNEXPLAINED
    return ours if ours == theirs and ours.__class__ is theirs.__class__ else _UNEXPLAINED


def _exactly(a: Number, b: Number) -> bool:
    return a.__class__ is b.__class__ and same_number(a, b)
