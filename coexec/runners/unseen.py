"""Whether a node does for sizes that no trace had what it did in the traces.

In:  a node, and the values of the symbols in its sizes.
Out: yes, if a trace had these values; else only if the node's function is known to do the same for all
     sizes, if none of its sizes is zero or one, if tensors are contiguous where they were, and if each of its
     operations, run on tensors without memory, gives the shapes that the node's expressions say.

Composite functions may choose their operations by size (`cdist` from 25 rows on, `pinv` by which side is
longer), and the expressions for an operation's arguments were found, not derived. So nothing is taken on
trust: what is not in the list is traced once for each combination of sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coexec._private import WithoutModes
from coexec.runners.bare import Bare, elementwise, returned
from coexec.tracegraph.callbacks import Applied
from coexec.tracegraph.calls import unflatten
from coexec.tracegraph.functions import INDEXING
from coexec.tracegraph.graph import (
    UNKNOWN,
    Node,
    TraceGraph,
    external_metas,
    meta_of_source,
    node_of,
    symbols_of,
)
from coexec.tracegraph.numbers import fed_numbers
from coexec.tracegraph.size_generic import SIZE_GENERIC
from coexec.tracegraph.sizes import Size, symbols_in, value_of, varies
from coexec.tracegraph.tape import Passed
from coexec.tracegraph.trace import (
    Dimension,
    Geometry,
    Input,
    Kind,
    Local,
    Operation,
    TensorMeta,
    with_leaves,
)

Values = Callable[[int], int | None]


@dataclass(frozen=True, slots=True)
class _Varying:
    """What varies in a node: sizes, and tensors with what their strides were like in a trace."""

    sizes: tuple[Size, ...]
    joints: tuple[tuple[TensorMeta, list[bool | None]], ...]


class Unseen:
    """What is known of the nodes of a graph, by the values of the symbols that each depends on.

    Attributes:
        watched: for each node with sizes that vary, what it depends on.
        known: the combinations of their values that hold.
    """

    def __init__(self, graph: TraceGraph) -> None:
        self._graph = graph
        self._metas = external_metas(graph)
        self.watched: dict[int, tuple[Dimension, ...]] = {n: s.sizes for n, s in graph.seen.items()}
        self.known = {n: set(s.values) for n, s in graph.seen.items()}
        self._varying: dict[int, _Varying] = {}

    def holds(self, node: Node, values: Values) -> bool:
        """Whether the node's expressions, and its operations, are right for these values."""
        watched = self.watched.get(node.id)
        if watched is None:
            return True
        key = tuple(UNKNOWN if (v := value_of(s, values)) is None else v for s in watched)
        if key in self.known[node.id]:
            return True
        if UNKNOWN in key and (not node.by_path or any(values(s) is None for s in symbols_of(node))):
            return False
        ranges = self._graph.seen[node.id].ranges
        if not all(r.admits(v) for r, v in zip(ranges, key, strict=False)):
            return False
        if node.kind is not Kind.FETCH and not self._is_right(node, values):  # Python itself makes a fetch
            return False
        self.known[node.id].add(key)
        return True

    def _is_right(self, node: Node, values: Values) -> bool:
        return self._is_generic(node) and self._gives_its_shapes(node, values)

    def _is_generic(self, node: Node) -> bool:
        if isinstance(node.piece, Passed):
            return _is_size_generic(self._graph.nodes[node.piece.of])
        if not node.by_path:
            return _is_size_generic(node)
        before = {n for a in node.alternatives for n in map(node_of, a.path or ())}
        return all(_is_size_generic(self._graph.nodes[n]) for n in before if n in self.watched)

    def _gives_its_shapes(self, node: Node, values: Values) -> bool:
        varying = self._varying_of(node)
        if any((v := value_of(s, values)) is None or v < 2 for s in varying.sizes):
            return False
        if any(_joints(m, values) != joints for m, joints in varying.joints):
            return False
        try:
            with WithoutModes(), torch.no_grad():
                return self._runs(node, values) and (
                    not _decides_unseen(node) or _takes_as_much(node, values)
                )
        except Exception:  # there is no such kernel, or it finds its arguments wrong
            return False

    def _varying_of(self, node: Node) -> _Varying:
        varying = self._varying.get(node.id)
        if varying is None:
            metas = [m for m in dict.fromkeys(_metas(node)) if varies(m.shape) or varies(m.stride)]
            sizes = {s for m in metas for s in m.shape if isinstance(s, Size)}
            seen = self._graph.seen[node.id].example
            joints = tuple((m, _joints(m, seen.get)) for m in metas)
            varying = self._varying[node.id] = _Varying(tuple(sizes), joints)
        return varying

    def _runs(self, node: Node, values: Values) -> bool:
        metas = [
            meta_of_source(self._graph, node, i, self._metas)
            for i in range(len(node.alternatives[0].sources))
        ]
        sources = [_bare(m, values) for m in metas if m is not None]
        if len(sources) < len(metas):
            return False
        results: dict[Local, Bare] = {}

        def argument(a: Any) -> Any:
            if isinstance(a, Input):
                return sources[a.index]
            if isinstance(a, Local):
                return results[a]
            if isinstance(a, Size):
                return value_of(a, values)
            for fed in fed_numbers(a):
                origin = fed.origins[0]
                return self._graph.nodes[origin.node].numbers[origin.slot].value
            return a

        for index, operation in enumerate(node.operations):
            if operation.shaped_by_data:  # in a backward pass, as in the forward pass
                made = tuple(None if r is None else _bare(r.meta, values) for r in operation.results)
            else:
                made = _made(operation, [with_leaves(a, argument, list) for a in operation.args])
            if len(made) != len(operation.results):
                return False
            for number, (tensor, result) in enumerate(zip(made, operation.results, strict=True)):
                if result is None:
                    existing = operation.existing[number] if operation.existing else None
                    if tensor is not None and existing is not None and not _is(tensor, existing, values):
                        return False
                    continue
                if tensor is None or not _fits(tensor, result.meta, values, strides=result.alias is not None):
                    return False
                results[Local(index, number)] = tensor
        return True


def _is_size_generic(node: Node) -> bool:
    """Whether a node runs the same operations whatever sizes there are; a part of a backward pass follows."""
    return node.backward or node.function.__class__ is Applied or node.function in SIZE_GENERIC


def _decides_unseen(node: Node) -> bool:
    """Whether an index has a size that no operation has: a slice that takes all there is makes no slice."""
    own = symbols_in(tuple(slot.value for slot in node.numbers))
    used = symbols_in(tuple(o.args for o in node.operations))
    return node.function in INDEXING and not own <= used


def _takes_as_much(node: Node, values: Values) -> bool:
    """Whether an index by numbers alone, tried on a tensor without memory, gives what it gave in traces."""
    key: Any = node.key
    if node.function != torch.Tensor.__getitem__ or len(key[2]) != 1:
        return False
    numbers: Any = [value_of(s.value, values) if isinstance(s.value, Size) else s.value for s in node.numbers]
    args, _ = unflatten(key[0], [_bare(key[2][0], values).empty()], numbers)
    taken = torch.Tensor.__getitem__(*args)
    return _fits(Bare.of(taken), node.outputs[0].meta, values, strides=True)


def _metas(node: Node) -> Iterator[TensorMeta]:
    key: Any = node.key
    yield from key[2]
    yield from (o.meta for o in node.outputs)
    yield from (r.meta for o in node.operations for r in o.results if r is not None)


def _made(operation: Operation, arguments: Sequence[Any]) -> tuple[Bare | None, ...]:
    if len(operation.results) == 1 and operation.results[0] is not None:
        alike = elementwise(operation.target, arguments, operation.results[0].meta.dtype)
        if alike is not None:
            return (alike,)
    return returned(operation.target, arguments)


def _bare(meta: TensorMeta, values: Values) -> Bare:
    return Bare(_values(meta.shape, values), _values(meta.stride, values), meta.dtype)


def _joints(meta: TensorMeta, values: Values) -> list[bool | None]:
    """Which dimensions are one piece with the next, on which it depends what is a view and what a copy."""
    sizes = [(value_of(n, values), value_of(s, values)) for n, s in zip(meta.shape, meta.stride, strict=True)]
    return [
        None if None in (stride, n, inner) else stride == n * inner  # type: ignore[operator]  # none is None
        for (_, stride), (n, inner) in itertools.pairwise(sizes)
    ]


def _is(tensor: Bare, geometry: Geometry, values: Values) -> bool:
    shape, stride = (_values(sizes, values) for sizes in geometry)
    return tensor.shape == shape and tensor.stride == stride


def _fits(tensor: Bare, meta: TensorMeta, values: Values, *, strides: bool) -> bool:
    if strides:
        return _is(tensor, (meta.shape, meta.stride), values)
    return tensor.shape == _values(meta.shape, values)


def _values(sizes: Sequence[Any], values: Values) -> tuple[int, ...]:
    out = [value_of(s, values) for s in sizes]
    if any(v is None for v in out):
        raise ValueError("a size has no value")
    return tuple(v for v in out if v is not None)
