"""Equal parts of a TraceGraph as the same objects, so that comparing them is comparing addresses.

In:  a TraceGraph.
Out: an equal one in which equal bindings, and equal metadata, are one object each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coexec.tracegraph.graph import Captured, Node, TraceGraph
from coexec.tracegraph.trace import Produced


class Interner:
    """Gives the same object for equal values, when it is called with them."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:  # noqa: D102  # said above
        return self._known.setdefault((value.__class__, value), value)


def interned(graph: TraceGraph, one: Interner) -> TraceGraph:
    """The graph with equal parts shared."""
    return replace(graph, nodes=tuple(_node(n, one) for n in graph.nodes))


def outputs_of(graph: TraceGraph, one: Interner) -> tuple[tuple[Produced, ...], ...]:
    """The binding of every output of every node."""
    return tuple(tuple(one(Produced(n.id, i)) for i in range(len(n.outputs))) for n in graph.nodes)


def captured_of(graph: TraceGraph, one: Interner) -> tuple[Captured, ...]:
    """The binding of every captured tensor."""
    return tuple(one(Captured(i)) for i in range(len(graph.captured)))


def _node(node: Node, one: Interner) -> Node:
    key: Any = node.key
    return replace(
        node,
        key=(key[0], one(key[1]), tuple(one(m) for m in key[2])),
        outputs=tuple(replace(o, meta=one(o.meta)) for o in node.outputs),
        alternatives=tuple(
            replace(a, bindings=tuple(None if b is None else one(b) for b in a.bindings))
            for a in node.alternatives
        ),
    )
