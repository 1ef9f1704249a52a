"""Places of numbers in an event.

In:  an event.
Out: the event with some of its numbers replaced, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coexec.tracegraph.numbers import takes_numbers
from coexec.tracegraph.trace import Event, Operation, TensorMeta


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number is.

    Attributes:
        kind: "input shape" and so on of a tensor, "number" among those that Python passed, "argument" of an
            operation, or "value" where that decides about values and never about a shape.
        index: of the tensor, the number or the operation.
        position: of the dimension or the argument.
    """

    kind: str
    index: int
    position: int


Replace = Callable[[Place, Any], Any]


def mapped(event: Event, number: Replace) -> Event:
    """An event with every size, and every float, replaced; always in the same order.

    Numbers below two are left as they are.
    """

    def one(place: Place, value: Any) -> Any:
        if value.__class__ is float or (value.__class__ is int and value >= 2):
            return number(place, value)
        return value

    def meta(m: TensorMeta, where: str, index: int) -> TensorMeta:
        return replace(
            m,
            shape=tuple([one(Place(f"{where} shape", index, d), n) for d, n in enumerate(m.shape)]),
            stride=tuple([one(Place(f"{where} stride", index, d), n) for d, n in enumerate(m.stride)]),
        )

    def argument(place: Place, value: Any) -> Any:
        if value.__class__ is tuple:
            return tuple([argument(place, v) for v in value])
        return one(place, value)

    def operation(index: int, o: Operation) -> Operation:
        args = []
        for position, a in enumerate(o.args):
            kind = "value" if takes_numbers(o.target, position) else "argument"
            args.append(argument(Place(kind, index, position), a))
        results = tuple(
            None if r is None else replace(r, meta=meta(r.meta, "result", index)) for r in o.results
        )
        return replace(o, args=tuple(args), results=results)

    key: Any = event.key
    metas = tuple([meta(m, "input", i) for i, m in enumerate(key[2])])
    numbers = tuple([one(Place("number", i, 0), n) for i, n in enumerate(event.numbers)])
    implicit = tuple(
        [None if m is None else meta(m, "implicit", i) for i, m in enumerate(event.implicit_metas)]
    )
    operations = tuple([operation(i, o) for i, o in enumerate(event.operations)])
    outputs = tuple(
        [replace(o, meta=meta(o.meta, "output", i), kept=False, uid=0) for i, o in enumerate(event.outputs)]
    )
    return replace(
        event,
        key=(key[0], key[1], metas),
        numbers=numbers,
        implicit_metas=implicit,
        operations=operations,
        outputs=outputs,
    )
