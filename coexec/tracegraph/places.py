"""Places of numbers in an event.

In:  an event.
Out: the event with some of its numbers replaced, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coexec.tracegraph.numbers import takes_numbers
from coexec.tracegraph.sizes import Size
from coexec.tracegraph.trace import Event, Geometry, Operation, Result, TensorMeta, with_leaves


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


_HOLDS_NUMBERS = (tuple, int, float, Size)


def mapped(event: Event, number: Replace) -> Event:
    """An event with every number replaced; always in the same order."""

    def one(n: Any, kind: str, index: int, position: int) -> Any:
        if n.__class__ is int or n.__class__ is float or n.__class__ is Size:
            return number(Place(kind, index, position), n)
        return n

    def meta(m: TensorMeta, where: str, index: int) -> TensorMeta:
        shape = tuple([one(n, f"{where} shape", index, d) for d, n in enumerate(m.shape)])
        stride = tuple([one(n, f"{where} stride", index, d) for d, n in enumerate(m.stride)])
        if shape == m.shape and stride == m.stride:
            return m
        return TensorMeta(shape, stride, m.offset, m.dtype, m.device, m.requires_grad, m.is_leaf)

    def geometry(g: Geometry, index: int) -> Geometry:
        shape = tuple([one(n, "existing shape", index, d) for d, n in enumerate(g[0])])
        return shape, tuple([one(n, "existing stride", index, d) for d, n in enumerate(g[1])])

    def operation(index: int, o: Operation) -> Operation:
        args = []
        for position, a in enumerate(o.args):
            if a.__class__ in _HOLDS_NUMBERS:
                kind = "value" if takes_numbers(o.target, position) else "argument"
                a = with_leaves(a, partial(one, kind=kind, index=index, position=position))
            args.append(a)
        results = tuple(
            [None if r is None else Result(meta(r.meta, "result", index), r.alias) for r in o.results]
        )
        existing = tuple([None if g is None else geometry(g, index) for g in o.existing])
        return Operation(
            o.target, tuple(args), results, o.writes, o.random, o.grad_mode, o.shaped_by_data, existing
        )

    key: Any = event.key
    metas = tuple([meta(m, "input", i) for i, m in enumerate(key[2])])
    numbers = tuple([one(n, "number", i, 0) for i, n in enumerate(event.numbers)])
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
        passages=None,
    )


def numbers_in(event: Event) -> list[tuple[Place, Any]]:
    """The numbers of an event, in order."""
    found: list[tuple[Place, Any]] = []

    def note(place: Place, n: Any) -> Any:
        found.append((place, n))
        return n

    mapped(event, note)
    return found


def outline(event: Event) -> Event:
    """An event without its numbers."""
    return mapped(event, lambda _, n: float if n.__class__ is float else int)


def with_sizes(event: Event, sizes: Sequence[Any], offsets: Sequence[Any]) -> Event:
    """An event with some of its numbers replaced.

    Args:
        event: the event.
        sizes: for each of `numbers_in(event)`, what is in its place; None for the number itself.
        offsets: the same for where each output begins in its memory.
    """
    left = iter(sizes)

    def replaced(_: Place, n: Any) -> Any:
        size = next(left)
        return n if size is None else size

    made = mapped(event, replaced)
    outputs = []
    for new, old, offset in zip(made.outputs, event.outputs, offsets, strict=True):
        meta = replace(new.meta, offset=old.meta.offset if offset is None else offset)
        outputs.append(replace(new, kept=old.kept, uid=old.uid, meta=meta))
    return replace(made, outputs=tuple(outputs))
