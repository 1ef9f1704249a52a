"""The pattern language over ATen operations.

    conv = is_op("conv2d")(wildcard(), constant(), wildcard()).has_attr(groups=1)
    pattern = is_op("relu")(is_op("add")(conv, wildcard()))

A pattern describes one value of a graph: the result of an operation, an input, or a constant. The
same pattern object used twice means the same value twice, so `is_op("mul")(x, x)` is a square. After
Relay's pattern language (Collage, section 2.3), with ATen's schemas in place of Relay's operators.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from placement.errors import PatternError
from placement.graph import TensorSpec

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "eq", "ne"})
"""Operations of two tensors that may be swapped."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """What one value of a graph may be. Subclasses say more; `|` gives alternatives."""

    predicates: tuple[Callable[[TensorSpec], bool], ...] = ()

    def __or__(self, other: Pattern) -> Pattern:
        """Either of two patterns; the left one is tried first."""
        return Alternatives(options=(self, other))

    def has_shape(self, *sizes: int | None) -> Pattern:
        """The same, if the value has this shape; None stands for any size."""

        def fits(spec: TensorSpec) -> bool:
            return len(spec.shape) == len(sizes) and all(
                wanted is None or wanted == size for wanted, size in zip(sizes, spec.shape, strict=True)
            )

        return self.where(fits)

    def has_dtype(self, *dtypes: torch.dtype) -> Pattern:
        """The same, if the value has one of these dtypes."""
        return self.where(lambda spec: spec.dtype in dtypes)

    def where(self, predicate: Callable[[TensorSpec], bool]) -> Pattern:
        """The same, if a function of the value's shape, stride, dtype and device says so."""
        return replace(self, predicates=(*self.predicates, predicate))

    def optional(self, wrap: Callable[[Pattern], Pattern]) -> Pattern:
        """This value, or what `wrap` makes of it: `conv.optional(lambda x: is_op("relu")(x))`."""
        return Alternatives(options=(wrap(self), self))


@dataclass(frozen=True, eq=False)
class Wildcard(Pattern):
    """Any value, or an optional argument that is absent; what makes the value stays outside."""


@dataclass(frozen=True, eq=False)
class Constant(Pattern):
    """A constant: a weight, a buffer or a number; of this value, where one is given."""

    value: float | None = None


@dataclass(frozen=True, eq=False)
class Operation(Pattern):
    """The result of an operation. Arguments are its tensors in the order of the schema."""

    names: tuple[str, ...] = ()
    arguments: tuple[Pattern, ...] | None = None
    """None: whatever they are."""
    attributes: tuple[tuple[str, Any], ...] = ()
    commutative: bool = False
    result: int = 0
    """Which result, for an operation that has several."""

    def __call__(self, *arguments: Pattern) -> Operation:
        """The operation on these arguments; further arguments of the operation may be anything."""
        for argument in arguments:
            if not isinstance(argument, Pattern):
                raise PatternError(
                    f"an argument of {'/'.join(self.names)} is {argument!r}, which is no pattern. Use "
                    "constant(value) for a number, wildcard() for anything, has_attr() for attributes."
                )
        most = max(_most_tensors(name) for name in self.names)
        if len(arguments) > most:
            raise PatternError(
                f"{'/'.join(self.names)} takes at most {most} tensors, and the pattern has {len(arguments)}. "
                "Attributes such as stride go to has_attr()."
            )
        return replace(self, arguments=tuple(arguments))

    def has_attr(self, **attributes: Any) -> Operation:
        """The same, if attributes have these values, or satisfy these functions.

        A pair or list whose numbers are all equal may be given as that number: `stride=1`.

        Raises:
            PatternError: if the operation has no such attribute.
        """
        for name in attributes:
            known = sorted({a for op in self.names for a in _attributes(op)})
            if name not in known:
                raise PatternError(
                    f"{'/'.join(self.names)} has no attribute {name!r}; it has {', '.join(known)}."
                )
        return replace(self, attributes=(*self.attributes, *attributes.items()))

    def get(self, index: int) -> Operation:
        """Another result of the same operation: `is_op("native_layer_norm")(...).get(1)`."""
        return replace(self, result=index)


@dataclass(frozen=True, eq=False)
class Alternatives(Pattern):
    """One of several patterns, the first that matches preferred."""

    options: tuple[Pattern, ...] = ()


@dataclass(frozen=True, eq=False)
class Outputs(Pattern):
    """Several values that leave together; the first one is where matching begins."""

    values: tuple[Pattern, ...] = ()


@dataclass(frozen=True, eq=False)
class Dominates(Pattern):
    """`child`'s value, where every path up from it ends at `parent`, and `path` matches all between."""

    parent: Pattern = Wildcard()
    path: Pattern = Wildcard()
    child: Pattern = Wildcard()


def is_op(*names: str, commutative: bool | None = None) -> Operation:
    """An operation by its short name (`add`), or by its overload (`add.Tensor`); several are alternatives.

    Args:
        names: names in ATen, or `namespace::name` for operations of other libraries.
        commutative: whether two arguments may be swapped; None: by `COMMUTATIVE`.

    Raises:
        PatternError: if there is no such operation.
    """
    if not names:
        raise PatternError("is_op() needs the name of an operation.")
    for name in names:
        _overloads(name)
    if commutative is None:
        commutative = all(name.partition(".")[0] in COMMUTATIVE for name in names)
    return Operation(names=tuple(names), commutative=commutative)


def wildcard() -> Pattern:
    """Any value."""
    return Wildcard()


def constant(value: float | None = None) -> Pattern:
    """A weight, buffer or number; a number (or a tensor of one element) of this value, where given."""
    return Constant(value=value)


def outputs(*values: Pattern) -> Pattern:
    """A subgraph with several results; they share pattern objects where they share values."""
    if not values:
        raise PatternError("outputs() needs at least one pattern.")
    return Outputs(values=tuple(values))


def dominates(parent: Pattern, path: Pattern, child: Pattern) -> Pattern:
    """`child`, fed by any number of operations like `path` that all come from `parent`.

    `dominates(is_op("conv2d"), is_op("relu", "add"), is_op("mul"))` is a convolution, any net of
    relu and add behind it, and a product at the end.
    """
    for role, value in (("path", path), ("child", child)):
        if not isinstance(value, Operation):
            raise PatternError(f"the {role} of dominates() must be an operation, is_op(...).")
        if role == "path" and value.arguments is not None:
            raise PatternError("the path of dominates() stands for many operations: give it no arguments.")
    return Dominates(parent=parent, path=path, child=child)


def roots(pattern: Pattern) -> tuple[Pattern, ...]:
    """The values that leave a pattern."""
    return pattern.values if isinstance(pattern, Outputs) else (pattern,)


def _packet(name: str) -> Any:
    namespace, _, rest = name.rpartition("::")
    base = rest.partition(".")[0]
    library = getattr(torch.ops, namespace or "aten")
    packet = getattr(library, base, None)
    if packet is None:
        close = difflib.get_close_matches(base, dir(torch.ops.aten), n=3)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise PatternError(f"there is no operation {name!r} in torch.ops.{namespace or 'aten'}.{hint}")
    return packet


def _overloads(name: str) -> list[Any]:
    packet = _packet(name)
    overload = name.rpartition("::")[2].partition(".")[2]
    if overload and overload not in packet.overloads():
        raise PatternError(
            f"there is no overload {name!r}; {name.partition('.')[0]} has {', '.join(packet.overloads())}."
        )
    return [getattr(packet, o) for o in ([overload] if overload else packet.overloads())]


def _most_tensors(name: str) -> float:
    def count(op: Any) -> float:
        types = [str(a.type) for a in op._schema.arguments if not a.is_out]
        if any("Tensor" in t and "List" in t for t in types):
            return float("inf")
        return sum("Tensor" in t for t in types)

    return max(count(op) for op in _overloads(name))


def _attributes(name: str) -> set[str]:
    return {a.name for op in _overloads(name) for a in op._schema.arguments if "Tensor" not in str(a.type)}
