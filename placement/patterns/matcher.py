"""Where a pattern occurs in a graph.

In:  an OpGraph and a pattern.
Out: matches, each a convex set of operations that the pattern names, without duplicates.

Matching goes from results to arguments and backtracks, because swapped arguments, alternatives and
values that occur twice make an early choice wrong later. What a wildcard matches stays outside. A
match's inner values must not be used outside of it, except those that the pattern lists as outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from placement.errors import PatternError
from placement.graph import OpGraph, spec_of
from placement.patterns.language import (
    Alternatives,
    Constant,
    Dominates,
    Operation,
    Outputs,
    Pattern,
    Wildcard,
    roots,
)


@dataclass(frozen=True, slots=True)
class _State:
    """What has been decided: the value of each pattern object, and the operations inside."""

    values: Mapping[Pattern, Any]
    inside: int

    def bind(self, pattern: Pattern, value: Any) -> _State:
        return _State({**self.values, pattern: value}, self.inside)

    def take(self, index: int) -> _State:
        return _State(self.values, self.inside | 1 << index)


_NOTHING = _State({}, 0)


def match_at(graph: OpGraph, pattern: Pattern, index: int) -> list[int]:
    """The masks of all matches whose first value is a result of one operation."""
    found: dict[int, None] = {}
    first, *others = roots(pattern)
    for node in _values(graph, index):
        states: Iterator[_State] = _match(graph, first, node, _NOTHING)
        for other in others:
            states = _also(graph, other, states)
        for state in states:
            if state.inside >> index & 1 and _is_closed(graph, state, (first, *others)):
                found[state.inside] = None
    return list(found)


def match(graph: OpGraph, pattern: Pattern) -> list[int]:
    """The masks of all matches in a graph, without duplicates."""
    found: dict[int, None] = {}
    for index in range(len(graph)):
        found.update(dict.fromkeys(match_at(graph, pattern, index)))
    return list(found)


def _values(graph: OpGraph, index: int) -> tuple[Node, ...]:
    return graph.ops[index].results


def _also(graph: OpGraph, pattern: Pattern, states: Iterator[_State]) -> Iterator[_State]:
    """Each state with a further output of the pattern found somewhere in the graph."""
    for state in states:
        for index in range(len(graph)):
            for node in _values(graph, index):
                yield from _match(graph, pattern, node, state)


def _is_closed(graph: OpGraph, state: _State, leaving: tuple[Pattern, ...]) -> bool:
    """Whether the set can run as one, and only what may leave it is used outside."""
    allowed = 0
    for pattern in leaving:
        value = state.values[pattern]
        if isinstance(value, Node) and value in graph.producer:
            allowed |= 1 << graph.producer[value]
    return not graph.sinks(state.inside) & ~allowed and graph.is_convex(state.inside)


def _match(graph: OpGraph, pattern: Pattern, value: Any, state: _State) -> Iterator[_State]:
    """The states in which a pattern stands for a value."""
    if pattern in state.values:
        if _same(state.values[pattern], value):
            yield state
        return
    if not _holds(pattern, value):
        return
    for found in _match_kind(graph, pattern, value, state):
        yield found.bind(pattern, value)


def _match_kind(graph: OpGraph, pattern: Pattern, value: Any, state: _State) -> Iterator[_State]:
    match pattern:
        case Wildcard():
            yield state
        case Constant():
            if _is_constant(graph, value, pattern.value):
                yield state
        case Alternatives():
            for option in pattern.options:
                yield from _match(graph, option, value, state)
        case Operation():
            yield from _match_operation(graph, pattern, value, state)
        case Dominates():
            yield from _match_dominates(graph, pattern, value, state)
        case Outputs():
            raise PatternError("outputs() can only be the whole pattern, not a part of one.")


def _match_operation(graph: OpGraph, pattern: Operation, value: Any, state: _State) -> Iterator[_State]:
    if not isinstance(value, Node) or value not in graph.producer:
        return
    op = graph.ops[graph.producer[value]]
    if not _is_named(op.target, pattern.names) or not _has_attributes(op.attributes, pattern):
        return
    if pattern.result != _result_index(value):
        return
    inside = state.take(op.index)
    if pattern.arguments is None:
        yield inside
        return
    inputs = list(op.inputs)
    orders = [inputs]
    if pattern.commutative and len(pattern.arguments) == 2 and len(inputs) == 2:
        orders.append(inputs[::-1])
    has_list = any("List" in str(a.type) and "Tensor" in str(a.type) for a in op.target._schema.arguments)
    for order in orders:
        if len(order) < len(pattern.arguments) or (has_list and len(order) != len(pattern.arguments)):
            continue
        yield from _match_all(graph, pattern.arguments, order, inside)


def _match_all(
    graph: OpGraph, patterns: tuple[Pattern, ...], values: list[Any], state: _State
) -> Iterator[_State]:
    if not patterns:
        yield state
        return
    for found in _match(graph, patterns[0], values[0], state):
        yield from _match_all(graph, patterns[1:], values[1:], found)


def _match_dominates(graph: OpGraph, pattern: Dominates, value: Any, state: _State) -> Iterator[_State]:
    """Child, then every choice of which values above it still belong to the path."""
    assert isinstance(pattern.path, Operation)
    for below in _match(graph, pattern.child, value, state):
        child = graph.producer[value]
        yield from _grow_path(graph, pattern, list(_operands(graph, child)), below, None)


def _grow_path(
    graph: OpGraph, pattern: Dominates, pending: list[Node], state: _State, parent: Node | None
) -> Iterator[_State]:
    """Decides for each pending value whether it is the parent or part of the path."""
    while pending and (pending[0] is parent or state.inside >> graph.producer[pending[0]] & 1):
        pending = pending[1:]
    if not pending:
        if parent is not None:
            yield state
        return
    value, rest = pending[0], pending[1:]
    if parent is None:
        for found in _match(graph, pattern.parent, value, state):
            yield from _grow_path(graph, pattern, rest, found, value)
    assert isinstance(pattern.path, Operation)
    for found in _match_operation(graph, pattern.path, value, state):
        above = list(_operands(graph, graph.producer[value]))
        if _holds(pattern.path, value) and above:
            yield from _grow_path(graph, pattern, rest + above, found, parent)


def _operands(graph: OpGraph, index: int) -> Iterator[Node]:
    """The results of other operations that one reads; inputs and constants don't count as paths."""
    for value in dict.fromkeys(graph.ops[index].inputs):
        if isinstance(value, Node) and value in graph.producer:
            yield value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Node) or isinstance(right, Node):
        return left is right
    return type(left) is type(right) and bool(left == right)


def _holds(pattern: Pattern, value: Any) -> bool:
    if not pattern.predicates:
        return True
    if not isinstance(value, Node):
        return False
    spec = spec_of(value)
    return all(predicate(spec) for predicate in pattern.predicates)


def _is_constant(graph: OpGraph, value: Any, wanted: float | None) -> bool:
    if isinstance(value, Node):
        if value.op != "get_attr":
            return False
        if wanted is None:
            return True
        tensor = getattr(graph.module, str(value.target))
        return isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and tensor.item() == wanted
    return isinstance(value, (bool, int, float)) and (wanted is None or value == wanted)


def _is_named(target: Any, names: tuple[str, ...]) -> bool:
    return any(_names(name, target._schema) for name in names)


def _names(name: str, schema: Any) -> bool:
    namespace, _, base = schema.name.partition("::")
    wanted_namespace, _, rest = name.rpartition("::")
    wanted_base, _, overload = rest.partition(".")
    if (wanted_namespace or "aten", wanted_base) != (namespace, base):
        return False
    return not overload or overload == (schema.overload_name or "default")


def _has_attributes(attributes: Mapping[str, Any], pattern: Operation) -> bool:
    for name, wanted in pattern.attributes:
        if name not in attributes:
            return False
        value = attributes[name]
        if callable(wanted):
            if not wanted(value):
                return False
        elif isinstance(value, (list, tuple)):
            listed = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] * len(value)
            if list(value) != listed:
                return False
        elif value != wanted:
            return False
    return True


def _result_index(value: Node) -> int:
    return value.args[1] if value.target is operator.getitem else 0  # type: ignore[return-value]
