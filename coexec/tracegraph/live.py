"""The part of a TraceGraph that iterations still take.

The first iteration of a program often makes state that later ones only use: an optimizer's moments,
for instance. The nodes that made what has become a captured tensor cannot be taken again for that
tensor, so the symbolic graph leaves them out; a program that does take them falls back and is traced.

The same can be done with what no iteration has done for long. A fork ends a compiled block, so what a program
only did at its beginning would part its blocks for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from coexec.tracegraph.graph import END, START, Alternative, Fed, Node, TraceGraph, node_of
from coexec.tracegraph.optimizers import updates_several
from coexec.tracegraph.order import before_each, reachable, turned_around
from coexec.tracegraph.trace import Computed, Produced

#: A node, and which events made its arguments; None stands for an argument that no event made.
Bound = tuple[int, tuple[Produced | None, ...]]


@dataclass(frozen=True, slots=True)
class Way:
    """How an iteration went through the graph.

    Attributes:
        path: its nodes in order, without `START` and `END`.
        bound: of nodes with several alternatives, which events made their arguments.
    """

    path: tuple[int, ...]
    bound: tuple[Bound, ...]


def bound_of(node: Node, arguments: Iterable[object]) -> Bound:
    """Which events made arguments of a node: bindings of an alternative, or what an iteration has."""
    return node.id, tuple([a if isinstance(a, Produced) else None for a in arguments])


def live(
    graph: TraceGraph, ways: Collection[Way] | None = None, retired: Collection[object] = ()
) -> TraceGraph:
    """The graph without nodes that made captured tensors; the graph itself if nothing would be left.

    Args:
        graph: a TraceGraph.
        ways: if there are any, only what these have remains of what is left.
        retired: updates that are made one by one from now on.
    """
    if ways is not None:
        graph = live(graph, None, retired)
    captured = set(graph.captured)
    gone = {
        n.id
        for n in graph.nodes
        if any(o.kept and o.uid in captured for o in n.outputs)
        or (n.function in retired and updates_several(n.key))
    }
    if not gone and ways is None:
        return graph
    taken = {(s, t) for s, targets in graph.edges.items() for t in targets}
    bound: set[Bound] | None = None
    if ways is not None:
        taken &= {edge for way in ways for edge in pairwise((START, *way.path, END))}
        bound = {b for way in ways for b in way.bound}
    alive = {n.id for n in graph.nodes} - gone
    while True:
        there = alive | {START, END}
        edges = {
            s: [t for t in targets if (s, t) in taken and t in there]
            for s, targets in graph.edges.items()
            if s in there
        }
        after = reachable(edges, START)
        between = (after & reachable(turned_around(edges), END)) - {START, END}
        before = before_each(edges, between)
        alternatives = {
            i: tuple(
                a
                for a in graph.nodes[i].alternatives
                if _possible(a, before[i] | 1 << i) and _is_taken(graph.nodes[i], a, bound)
            )
            for i in between
        }
        remaining = {i for i in between if alternatives[i]}
        if remaining == alive:
            break
        alive = remaining
    if END not in after:
        return graph
    nodes = tuple(
        replace(n, alternatives=alternatives[n.id]) if n.id in alive else replace(n, alternatives=())
        for n in graph.nodes
    )
    kept_edges = {
        s: tuple(t for t in targets if (t in alive or t == END) and (s, t) in taken)
        for s, targets in graph.edges.items()
        if s in alive or s == START
    }
    return replace(graph, nodes=nodes, edges=kept_edges)


def _possible(alternative: Alternative, before: int) -> bool:
    """Whether what an alternative takes may have run before: a way there may have gone with other nodes."""
    nodes = {b.event for b in alternative.bindings if isinstance(b, Produced)}
    nodes |= {b.node for b in alternative.bindings if isinstance(b, Fed)}
    nodes |= {s.event for s in alternative.sources if isinstance(s, (Computed, Produced))}
    nodes |= set(map(node_of, alternative.path or ()))
    return all(before >> n & 1 for n in nodes)


def _is_taken(node: Node, alternative: Alternative, bound: Collection[Bound] | None) -> bool:
    return bound is None or len(node.alternatives) == 1 or bound_of(node, alternative.bindings) in bound
