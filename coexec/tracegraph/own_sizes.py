"""Gives each node of a graph symbols of its own, and says how they depend on each other.

In:  a TraceGraph of traces with symbolic calls (see `coexec.tracegraph.generalize_calls`): nodes of the same
     kind have the same symbols, whatever the values of these are.
Out: the graph in which a size of a node's argument is the size of what made it. Where that is not one thing,
     or comes from outside, it is a symbol that an iteration shows when it takes the node.

A call may need two sizes to be equal that are shown at two places: the rows that two indices take. If one
place always comes before the other one, and no trace had different values there, there is one symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coexec.tracegraph.following import argument_of_before
from coexec.tracegraph.graph import (
    END,
    START,
    Captured,
    Fed,
    Node,
    NodeBinding,
    NumberSlot,
    Seen,
    TraceGraph,
    symbols_of,
)
from coexec.tracegraph.sizes import Size, Symbol, number_of, substituted, symbols_in, value_of, varies
from coexec.tracegraph.tape import Passed, at_of
from coexec.tracegraph.trace import Geometry, Operation, Produced, TensorMeta, with_leaves

#: For each trace, by node: the value of each symbol that all nodes of its kind have.
Values = Sequence[Mapping[int, Mapping[int, int]]]

#: Searches for equal sizes; each may find what the one before has made possible.
_ROUNDS = 20


def with_own_sizes(graph: TraceGraph, values: Values, captured: Mapping[Captured, TensorMeta]) -> TraceGraph:
    """The graph with symbols for each node, of which some are sizes of earlier nodes.

    Args:
        graph: nodes of the same kind have the same symbols.
        values: those of the symbols in each trace, by node.
        captured: the metadata of captured tensors that have no other in any trace.
    """
    if not any(values):
        return graph
    sizes = _Sizes(graph, values, captured)
    sizes.find()
    for _ in range(_ROUNDS):
        if not sizes.equate():
            break
        sizes.find()
    return sizes.frozen()


@dataclass(frozen=True, slots=True)
class _Shown:
    """Where a node shows what one of its symbols is: a dimension of an argument, or a number."""

    argument: int  #: or number
    what: str  #: "shape", "stride", or "number"
    dimension: int


class _Sizes:
    def __init__(self, graph: TraceGraph, values: Values, captured: Mapping[Captured, TensorMeta]) -> None:
        self.graph = graph
        self.values = values
        self.captured = captured
        self.owner = {n.id: n.piece.of if isinstance(n.piece, Passed) else n.id for n in graph.nodes}
        self.symbols = [sorted(_symbols(n)) for n in graph.nodes]
        self.shown = [_shown(n) for n in graph.nodes]
        self.numbers: dict[tuple[int, int], int] = {}  # of a node's own symbol
        self.owners: list[int] = []  # the node of each of these numbers
        self.equal: dict[int, Size] = {}  # by number, what is the same before
        self.own: list[dict[int, Size | int]] = []  # of each node: what its symbols are
        self.nodes: list[Node] = []  # with these
        self.before = dominators(graph.edges, len(graph.nodes))
        self.in_traces: list[dict[int, int]] = []  # by number, the values in each trace

    def find(self) -> None:
        """Says for each node what its symbols are."""
        self.own, self.nodes = [], []
        for node in self.graph.nodes:
            if self.owner[node.id] != node.id:
                own = self.own[self.owner[node.id]]
            else:
                own = {s: self._symbol(node, s) for s in self.symbols[node.id]}
            self.own.append(own)
            self.nodes.append(_substituted(node, own) if own else node)
        places = list(enumerate(self.numbers))
        self.in_traces = [{i: of[n][s] for i, (n, s) in places if n in of} for of in self.values]

    def _symbol(self, node: Node, symbol: int) -> Size | int:
        places = self.shown[node.id].get(symbol, ())
        tensors = [p for p in places if p.what != "number"]
        if tensors:
            size = self._of_argument(node, tensors[0])
            if size is not None:
                return size
        number = self.numbers.setdefault((node.id, symbol), len(self.numbers))
        if number == len(self.owners):
            self.owners.append(node.id)
        return self.equal.get(number, Size(((1, (number,)),)))

    def _of_argument(self, node: Node, place: _Shown) -> Size | int | None:
        """The size of an argument, in the symbols of the nodes before; None if it is none of these."""
        before = argument_of_before(node, self.graph.nodes, place.argument)
        if before is not None:
            return _size(self.nodes[before[0]].key, before[1], place)
        found = {self._of_binding(node, a.bindings[place.argument], place) for a in node.alternatives}
        return found.pop() if len(found) == 1 else None

    def _of_binding(self, node: Node, binding: NodeBinding, place: _Shown) -> Size | int | None:
        if isinstance(binding, Produced):
            meta = self.nodes[binding.event].outputs[binding.output].meta
            return _sizes(meta, place.what)[place.dimension]
        if isinstance(binding, Fed) and binding.node < node.id:
            return _size(self.nodes[binding.node].key, binding.argument, place)
        if isinstance(binding, Captured) and binding in self.captured:
            return _sizes(self.captured[binding], place.what)[place.dimension]
        return None

    # --- equal sizes ---

    def equate(self) -> bool:
        """Makes symbols one that calls need to be equal; whether there were any."""
        known = len(self.equal)
        for node in self.graph.nodes:
            for symbol, places in self.shown[node.id].items():
                size = self.own[node.id][symbol]
                for place in places:
                    if place.what != "number":
                        other = self._of_argument(node, place)
                        if other is not None and other != size:
                            self._equate(size, other)
                            self._equate(other, size)
        return len(self.equal) > known

    def _equate(self, size: Size | int, other: Size | int) -> None:
        """Says that a symbol is another size, if that is known before and no trace is against it."""
        number = number_of(size) if isinstance(size, Size) else None
        if number is None or number in self.equal or not isinstance(other, Size):
            return
        if symbols_in(other) & self.equal.keys():
            return  # not what it was at the last `find`
        before = self.before[self.owners[number]]  # without the owner
        if not all(before >> self.owners[s] & 1 for s in symbols_in(other)):
            return
        shown = [known for known in self.in_traces if number in known]
        if shown and all(known[number] == value_of(other, known.get) for known in shown):
            others = {n: substituted(e, {number: other}) for n, e in self.equal.items()}
            self.equal = {n: e for n, e in others.items() if isinstance(e, Size)} | {number: other}

    # --- the end ---

    def frozen(self) -> TraceGraph:
        """The graph; its symbols are numbered in the order of nodes."""
        used = sorted({s for own in self.own for size in own.values() for s in symbols_in(size)})
        new = {old: i for i, old in enumerate(used)}
        renumber = {old: Size(((1, (i,)),)) for old, i in new.items()}
        places = list(self.numbers)
        own = [{s: substituted(size, renumber) for s, size in o.items()} for o in self.own]
        return replace(
            self.graph,
            nodes=tuple([_with_own(n, o) for n, o in zip(self.graph.nodes, own, strict=True)]),
            symbols=tuple([self.graph.symbols[places[old][1]] for old in used]),
            seen=self._seen(own, [{new[i]: v for i, v in of.items() if i in new} for of in self.in_traces]),
        )

    def _seen(
        self, own: Sequence[Mapping[int, Size | int]], examples: Sequence[Mapping[int, int]]
    ) -> dict[int, Seen]:
        """For each node with symbols the values that these had, in all nodes of the same kind."""
        combinations: dict[object, set[tuple[int, ...]]] = {}
        kinds: dict[int, object] = {}
        watched = [sorted(symbols_of(n)) for n in self.graph.nodes]
        for node in self.graph.nodes:
            if watched[node.id] and not at_of(node.piece):
                kinds[node.id] = kind = (*_kind(node), tuple(watched[node.id]))
                here = [of_trace[node.id] for of_trace in self.values if node.id in of_trace]
                values = {tuple([of_event[s] for s in watched[node.id]]) for of_event in here}
                combinations.setdefault(kind, set()).update(values)
        fixed = {
            n.id: Seen(
                sizes=tuple([own[n.id][s] for s, _ in at_of(n.piece)]),
                values=frozenset({tuple([v for _, v in at_of(n.piece)])}),
                example={},
                ranges=(Symbol(0, -1),),  # and nothing else
            )
            for n in self.graph.nodes
            if at_of(n.piece)
        }
        return fixed | {
            n: Seen(
                sizes=tuple([own[n][s] for s in watched[n]]),
                values=frozenset(combinations[kind]),
                example=next(e for e, of_trace in zip(examples, self.values, strict=True) if n in of_trace),
                ranges=tuple([self.graph.symbols[s] for s in watched[n]]),
            )
            for n, kind in kinds.items()
        }


def _kind(node: Node) -> tuple[object, ...]:
    """What nodes have in common that do the same on tensors of the same sizes."""
    piece = replace(node.piece, of=-1) if isinstance(node.piece, Passed) else node.piece
    targets = tuple([o.target for o in node.operations])
    sizes = tuple([s.value for s in node.numbers if isinstance(s.value, Size)])
    return node.function, node.key, node.location, piece, sizes, targets


def dominators(edges: Mapping[int, Sequence[int]], nodes: int) -> list[int]:
    """The nodes that every path to a node goes through, as bits; the node itself is not one of them."""
    found = [(1 << nodes) - 1] * nodes
    for source in sorted(edges):  # ids are a topological order
        through = 0 if source == START else found[source] | 1 << source
        for target in edges[source]:
            if target != END:
                found[target] &= through
    return found


def _symbols(node: Node) -> set[int]:
    found: set[int] = set()

    def note(size: Size | int) -> Size | int:
        found.update(symbols_in(size))
        return size

    _mapped(node, note)
    return found


def _shown(node: Node) -> dict[int, list[_Shown]]:
    """Where a node shows each of its symbols, in the order in which they are looked at."""
    found: dict[int, list[_Shown]] = {}
    if isinstance(node.piece, Passed):
        return found
    key: Any = node.key
    for argument, meta in enumerate(key[2]):
        for what in ("shape", "stride"):
            for dimension, size in enumerate(_sizes(meta, what)):
                number = number_of(size) if isinstance(size, Size) else None
                if number is not None:
                    found.setdefault(number, []).append(_Shown(argument, what, dimension))
    for slot, number_slot in enumerate(node.numbers):
        number = number_of(number_slot.value) if isinstance(number_slot.value, Size) else None
        if number is not None:
            found.setdefault(number, []).append(_Shown(slot, "number", 0))
    return found


def _sizes(meta: TensorMeta, what: str) -> tuple[Size | int, ...]:
    return meta.shape if what == "shape" else meta.stride


def _size(key: Any, argument: int, place: _Shown) -> Size | int | None:
    """The same size of an argument of another node; None if that is no argument which Python passed."""
    return _sizes(key[2][argument], place.what)[place.dimension] if argument < len(key[2]) else None


def _with_own(node: Node, sizes: Mapping[int, Size | int]) -> Node:
    """A node with its sizes, and without the symbols that all nodes of its kind have."""
    if isinstance(node.piece, Passed) and node.piece.at:
        at = tuple([(place, value) for place, (_, value) in enumerate(node.piece.at)])
        node = replace(node, piece=replace(node.piece, at=at))
    return _substituted(node, sizes) if sizes else node


def _substituted(node: Node, sizes: Mapping[int, Size | int]) -> Node:
    known: dict[Size, Size | int] = {}  # a node has the same ones in many places

    def of(size: Size | int) -> Size | int:
        if not isinstance(size, Size):
            return size
        found = known.get(size)
        if found is None:
            found = known[size] = substituted(size, sizes)
        return found

    return _mapped(node, of)


def _varies(operation: Operation) -> bool:
    """Whether a size in an operation varies."""
    metas = [r.meta for r in operation.results if r is not None]
    return varies(operation.args) or any(m.is_symbolic for m in metas) or any(map(varies, operation.existing))


def _mapped(node: Node, size: Callable[[Any], Any]) -> Node:
    """A node with each size replaced."""

    def geometry(g: Geometry) -> Geometry:
        return tuple(map(size, g[0])), tuple(map(size, g[1]))

    def meta(m: Any) -> Any:
        if m is None or not m.is_symbolic:
            return m
        shape, stride = geometry((m.shape, m.stride))
        return replace(m, shape=shape, stride=stride, offset=size(m.offset))

    def leaf(a: Any) -> Any:
        return size(a) if isinstance(a, Size) else a

    def operation(o: Operation) -> Operation:
        if not _varies(o):
            return o
        results = tuple([None if r is None else replace(r, meta=meta(r.meta)) for r in o.results])
        existing = tuple([None if g is None else geometry(g) for g in o.existing])
        return replace(o, args=with_leaves(o.args, leaf), results=results, existing=existing)

    def slot(s: NumberSlot) -> NumberSlot:
        return replace(s, value=size(s.value)) if isinstance(s.value, Size) else s

    key: Any = node.key
    return replace(
        node,
        key=(key[0], key[1], tuple(map(meta, key[2]))),
        numbers=tuple(map(slot, node.numbers)),
        implicit_metas=tuple(map(meta, node.implicit_metas)),
        operations=tuple(map(operation, node.operations)),
        outputs=tuple([replace(o, meta=meta(o.meta)) if o.meta.is_symbolic else o for o in node.outputs]),
    )
