"""What a TraceGraph suggests beyond what was traced.

In:  a TraceGraph whose backward passes are in pieces.
Out: the graph with more edges and more alternatives, for paths that no trace has shown any part of.

With n layers that are left out at random, each pair of layers may be neighbours, and it takes many traces to
show every pair. But layers that came in front of the same layer are alike: what came behind one of them may
come behind the others. In the same way, values that were the same argument of one call stand for each other
wherever one of them is used.

Numbers that vary in one call of a function vary in its other calls at the same place: the steps that each
parameter has been updated, for instance.

A guess costs nothing but a larger graph. An iteration takes an edge only if Python makes the call at its end,
and an alternative only if the call's arguments are those that it names.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coexec.tracegraph.calls import number_class
from coexec.tracegraph.following import following
from coexec.tracegraph.graph import (
    END,
    Alternative,
    FedNumber,
    Node,
    NodeBinding,
    NodeSource,
    NumberSlot,
    TraceGraph,
)
from coexec.tracegraph.numbers import TRANSFORMS, is_number, same_number
from coexec.tracegraph.order import Groups, before_each
from coexec.tracegraph.sizes import Size
from coexec.tracegraph.tape import Passed
from coexec.tracegraph.trace import Computed, Constant, Dimension, Local, Produced

#: Edges that one group of places may get, and alternatives that a node may have.
MAX_EDGES, MAX_ALTERNATIVES = 4096, 64


def closed(graph: TraceGraph) -> TraceGraph:
    """Adds edges and alternatives that are like those of the graph."""
    edges = _edges(graph.edges)
    before = before_each(edges, range(len(graph.nodes)))
    alike = _alike(graph)
    nodes = [_with_alternatives(graph, n, alike, before[n.id]) for n in graph.nodes]
    nodes = _with_varying_numbers(nodes)
    return replace(graph, nodes=tuple(following(nodes, edges, graph.paths)), edges=edges)


def _edges(edges: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Every place gets the edges of those that it has an edge in common with, forward."""
    places: Groups[int] = Groups()
    first: dict[int, int] = {}
    for source, targets in edges.items():
        for target in targets:
            places.join(first.setdefault(target, source), source)
    found = dict(edges)
    for group in places.all():
        targets = tuple(sorted({t for s in group for t in edges[s] if t != END}))
        ends = any(END in edges[s] for s in group)
        if len(group) < 2 or len(group) * len(targets) > MAX_EDGES:
            continue
        for source in group:
            after = [t for t in targets if t > source]
            found[source] = tuple(dict.fromkeys((*edges[source], *after, *[END] * ends)))
    return found


def _alike(graph: TraceGraph) -> dict[Produced, tuple[Produced, ...]]:
    """For each value those that were the same argument of the same call."""
    groups: Groups[Produced] = Groups()
    for node in graph.nodes:
        for a, b in itertools.pairwise(node.alternatives):
            pair = _difference(a, b)
            if pair is not None:
                groups.join(*pair)
    found: dict[Produced, tuple[Produced, ...]] = {}
    for group in groups.all():
        members = sorted(group, key=lambda p: (p.event, p.output))
        for one in members:
            same = tuple([m for m in members if m != one and _look(graph, m) == _look(graph, one)])
            if same:
                found[one] = same
    return found


def _look(graph: TraceGraph, value: Produced) -> object:
    """The metadata of a value, whatever sizes it has where they vary."""
    meta = graph.nodes[value.event].outputs[value.output].meta
    return replace(meta, shape=_constant(meta.shape), stride=_constant(meta.stride))


def _constant(sizes: Iterable[Dimension]) -> tuple[int, ...]:
    return tuple([-1 if isinstance(s, Size) else s for s in sizes])


def _difference(a: Alternative, b: Alternative) -> tuple[Produced, Produced] | None:
    """The value of one alternative in whose place the other one has another, if that is all."""
    pairs = {(x, y) for x, y in zip(a.bindings, b.bindings, strict=True) if x != y}
    if len(pairs) != 1:
        return None
    [(x, y)] = pairs
    return (x, y) if isinstance(x, Produced) and isinstance(y, Produced) else None


def _with_alternatives(
    graph: TraceGraph, node: Node, alike: Mapping[Produced, tuple[Produced, ...]], before: int
) -> Node:
    known = {a.bindings: a for a in node.alternatives}
    waiting = list(node.alternatives)
    if any(not _is_explained(graph, node, a) for a in waiting):
        return node
    while waiting and len(known) <= MAX_ALTERNATIVES:
        alternative = waiting.pop(0)
        for old, new in _exchanges(alternative.bindings, alike):
            if not before >> new.event & 1:
                continue
            made = _exchanged(graph, alternative, old, new)
            if made.bindings not in known:
                known[made.bindings] = made
                waiting.append(made)
            elif known[made.bindings].sources != made.sources:
                return node  # it is not as simple as that
    if len(known) > MAX_ALTERNATIVES:
        return node
    alternatives = tuple(replace(a, number=number) for number, a in enumerate(known.values()))
    return replace(node, alternatives=alternatives)


def _exchanges(
    bindings: Iterable[NodeBinding], alike: Mapping[Produced, tuple[Produced, ...]]
) -> Iterator[tuple[Produced, Produced]]:
    for binding in dict.fromkeys(bindings):
        if isinstance(binding, Produced):
            for other in alike.get(binding, ()):
                yield binding, other


def _exchanged(graph: TraceGraph, alternative: Alternative, old: Produced, new: Produced) -> Alternative:
    bindings = tuple([new if b == old else b for b in alternative.bindings])
    sources = tuple([_exchanged_source(graph, s, old, new) for s in alternative.sources])
    return replace(alternative, bindings=bindings, sources=sources)


def _exchanged_source(graph: TraceGraph, source: NodeSource, old: Produced, new: Produced) -> NodeSource:
    if source == old:
        return new
    return _value(graph, new) if source == _value(graph, old) else source


def _value(graph: TraceGraph, made: Produced) -> Computed | Produced:
    """What operations read where a node takes an output of another one."""
    value = graph.nodes[made.event].outputs[made.output].value
    return Computed(made.event, value.operation, value.result) if isinstance(value, Local) else made


def _is_explained(graph: TraceGraph, node: Node, alternative: Alternative) -> bool:
    """Whether what a node reads follows from its arguments, and from nothing else."""
    if alternative.path is not None or alternative.pins:
        return False
    known: set[NodeSource | NodeBinding] = set(alternative.bindings)
    known |= {_value(graph, b) for b in alternative.bindings if isinstance(b, Produced)}
    of = node.piece.of if isinstance(node.piece, Passed) else None
    return all(
        s in known or isinstance(s, Constant) or (isinstance(s, Computed) and s.event == of)
        for s in alternative.sources
    )


def _with_varying_numbers(nodes: Sequence[Node]) -> list[Node]:
    """Nodes in which the numbers vary that vary in another node of the same call.

    Not where autograd goes through them, because what a backward pass computes may depend on their numbers.
    """
    groups: dict[Hashable, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.numbers and node.tape is None and not node.backward:
            groups[node.function, node.key, node.location, len(node.operations)].append(node)
    out = list(nodes)
    if any(node.by_path for node in nodes):
        return out
    for group in groups.values():
        like = max(group, key=lambda n: sum(s.classes is not None for s in n.numbers))
        for node in group:
            out[node.id] = _varying_like(node, like)
    return out


def _varying_like(node: Node, like: Node) -> Node:
    """A node with the numbers fed that are fed in another one; the node itself if they do not fit there."""
    if node is like or any(isinstance(slot.value, Size) for slot in (*node.numbers, *like.numbers)):
        return node
    operations = []
    for operation, other in zip(node.operations, like.operations, strict=True):
        args = _fed_like(operation.args, other.args, node, like.id)
        if operation.target is not other.target or args is None:
            return node
        operations.append(replace(operation, args=args))
    numbers = tuple(map(_slot_like, node.numbers, like.numbers))
    return replace(node, numbers=numbers, operations=tuple(operations))


def _slot_like(slot: NumberSlot, like: NumberSlot) -> NumberSlot:
    if like.classes is None:
        return slot
    assert not isinstance(slot.value, Size)
    return NumberSlot(slot.value, like.classes | (slot.classes or frozenset({number_class(slot.value)})))


def _fed_like(args: Any, like: Any, node: Node, other: int) -> Any:
    """Arguments with numbers fed where `like`, those of node `other`, have them; None if they differ."""
    if isinstance(like, FedNumber) and not isinstance(args, FedNumber):
        fed = FedNumber(tuple([o._replace(node=node.id) for o in like.origins if o.node == other]))
        values = [TRANSFORMS[o.transform](node.numbers[o.slot].value) for o in fed.origins]  # type: ignore[arg-type]  # no sizes
        return fed if values and all(is_number(args) and same_number(args, v) for v in values) else None
    if isinstance(args, tuple) and isinstance(like, tuple) and len(args) == len(like):
        made = tuple([_fed_like(a, b, node, other) for a, b in zip(args, like, strict=True)])
        return None if any(m is None and a is not None for m, a in zip(made, args, strict=True)) else made
    return args
