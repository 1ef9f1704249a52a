"""How the numbers of an event reach its operations.

A learning rate that changes is not another program: it is fed. Whether an operation's number follows
from the event's number is decided by comparing two traces in which it differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from coexec.tracegraph.calls import number_class
from coexec.tracegraph.graph import FedNumber, NumberOrigin, NumberSlot
from coexec.tracegraph.sizes import Size
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


def is_number(value: Any) -> bool:
    """Whether a value is a number that could be fed (a bool is not)."""
    return value.__class__ is float or value.__class__ is int


@dataclass(frozen=True, slots=True)
class Varying:
    """A number that two traces have differently: where it comes from, and both values."""

    node: int
    slot: int
    ours: Number
    theirs: Number


def varying(node: int, slots: Sequence[NumberSlot], numbers: Sequence[Number | Size]) -> list[Varying]:
    """The slots of a node that are fed, or have to be from now on."""
    return [
        Varying(node, index, slot.value, number)
        for index, (slot, number) in enumerate(zip(slots, numbers, strict=True))
        if not isinstance(slot.value, Size) and not isinstance(number, Size)
        if slot.classes is not None or not same_number(slot.value, number)
    ]


def fit(slots: Sequence[NumberSlot], numbers: Sequence[Number]) -> bool:
    """Whether a call's numbers are those that its slots say, or may be fed in their place.

    What sizes say has to be looked at by itself.
    """
    for slot, number in zip(slots, numbers, strict=True):
        if isinstance(slot.value, Size):
            continue
        if slot.classes is None:
            if not same_number(slot.value, number):
                return False
        elif number_class(number) not in slot.classes:
            return False
    return True


def same_sizes(slots: Sequence[NumberSlot], numbers: Sequence[Number | Size]) -> bool:
    """Whether a node and an event have the same expressions among their numbers."""
    return all(
        slot.value == number
        for slot, number in zip(slots, numbers, strict=True)
        if isinstance(slot.value, Size) or isinstance(number, Size)
    )


def agreements(operations: Sequence[Operation]) -> tuple[tuple[NumberOrigin, ...], ...]:
    """For each fed number that several numbers explain, these: they have to agree in an iteration."""
    fed = dict.fromkeys(f.origins for o in operations for f in fed_numbers(o.args))
    return tuple(origins for origins in fed if len(origins) > 1)


def agree(origins: Sequence[NumberOrigin], values: Mapping[int, Sequence[Number]]) -> bool:
    """Whether numbers that explain the same fed number are the same; `values` are those of each node."""
    fed = [TRANSFORMS[o.transform](values[o.node][o.slot]) for o in origins]
    return all(_exactly(f, fed[0]) for f in fed[1:])


def fed_numbers(args: Any) -> Iterator[FedNumber]:
    """The fed numbers among the arguments of an operation."""
    if isinstance(args, FedNumber):
        yield args
    elif isinstance(args, tuple):
        for a in args:
            yield from fed_numbers(a)


def unused(numbers: Sequence[Varying], operations: Sequence[Operation]) -> bool:
    """Whether a number varies that no operation has.

    Of an index that is a hint: a slice that takes all there is makes no slice, so what is true of two such
    numbers is not of a third.
    """
    used = {(o.node, o.slot) for op in operations for f in fed_numbers(op.args) for o in f.origins}
    return any((n.node, n.slot) not in used for n in numbers)


def unify_slots(slots: Sequence[NumberSlot], numbers: Sequence[Number | Size]) -> tuple[NumberSlot, ...]:
    """The slots of a node after another trace had `numbers` in them."""
    out = []
    for slot, number in zip(slots, numbers, strict=True):
        if isinstance(slot.value, Size) or isinstance(number, Size):
            out.append(slot)  # both have the same expression
        elif slot.classes is None and same_number(slot.value, number):
            out.append(slot)
        else:
            classes = slot.classes or frozenset({number_class(slot.value)})
            classes |= {number_class(number)}
            out.append(slot if classes == slot.classes else NumberSlot(slot.value, classes))
    return tuple(out)


def unify(
    node_operations: Sequence[Operation],
    operations: Sequence[Operation],
    candidates: Sequence[Varying],
) -> tuple[Operation, ...] | None:
    """Generalises a node's operations so that they also describe another trace's event.

    Returns:
        Operations in which varying numbers are `FedNumber`s; None when the operations differ in
        anything else, or in numbers that no transform of a candidate explains.
    """
    if len(node_operations) != len(operations):
        return None
    numbers = {(c.node, c.slot): c.theirs for c in candidates}
    unified = []
    for ours, theirs in zip(node_operations, operations, strict=True):
        if ours.target is not theirs.target or (ours.results, ours.writes) != (theirs.results, theirs.writes):
            return None
        if ours.grad_mode != theirs.grad_mode:
            return None
        args = []
        for index, (a, b) in enumerate(zip(ours.args, theirs.args, strict=True)):
            fed = candidates if candidates and takes_numbers(ours.target, index) else ()
            args.append(_unify_args(a, b, fed, numbers))
        if any(_is_unexplained(a) for a in args):
            return None
        unified.append(ours if are_those(args, ours.args) else replace(ours, args=tuple(args)))
    return tuple(unified)


def are_those(values: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very objects."""
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))


#: Operations of which a number decides the shape of the result.
_SHAPED_BY_NUMBERS = ("aten::arange", "aten::range", "aten::linspace", "aten::logspace")


@cache
def takes_numbers(target: Any, index: int) -> bool:
    """Whether a number in this argument may vary: it decides about values, and never about a shape."""
    name = target._schema.name
    if name in _SHAPED_BY_NUMBERS:
        return False
    if name == "aten::select":
        return True
    kind = str(target._schema.arguments[index].type)
    return kind.removeprefix("Optional[").removeprefix("List[").startswith(("number", "float", "Tensor"))


_UNEXPLAINED = object()


def _is_unexplained(args: Any) -> bool:
    return args is _UNEXPLAINED or (isinstance(args, tuple) and any(_is_unexplained(a) for a in args))


def _unify_args(
    ours: Any, theirs: Any, candidates: Sequence[Varying], numbers: dict[tuple[int, int], Number]
) -> Any:
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        made = tuple([_unify_args(a, b, candidates, numbers) for a, b in zip(ours, theirs, strict=True)])
        return ours if are_those(made, ours) else made
    if isinstance(ours, FedNumber):
        if not is_number(theirs):
            return _UNEXPLAINED
        return _fed(
            o
            for o in ours.origins
            if (o.node, o.slot) in numbers
            and _exactly(TRANSFORMS[o.transform](numbers[o.node, o.slot]), theirs)
        )
    if is_number(ours) and ours.__class__ is theirs.__class__:
        if same_number(ours, theirs):
            return ours
        return _fed(
            NumberOrigin(c.node, c.slot, name)
            for c in candidates
            for name, function in TRANSFORMS.items()
            if not (name == "float(x)" and c.ours.__class__ is float)  # that is x
            and _exactly(function(c.ours), ours)
            and _exactly(function(c.theirs), theirs)
        )
    if isinstance(ours, complex):
        return ours if repr(ours) == repr(theirs) else _UNEXPLAINED
    return ours if ours == theirs and ours.__class__ is theirs.__class__ else _UNEXPLAINED


def _fed(origins: Iterable[NumberOrigin]) -> Any:
    found = tuple(origins)
    return FedNumber(found) if found else _UNEXPLAINED


def _exactly(a: Number, b: Number) -> bool:
    return a.__class__ is b.__class__ and same_number(a, b)
