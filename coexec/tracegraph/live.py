"""The part of a TraceGraph that iterations still take.

The first iteration of a program often makes state that later ones only use: an optimizer's moments,
for instance. The nodes that made what has become a captured tensor cannot be taken again for that
tensor, so the symbolic graph leaves them out; a program that does take them falls back and is traced.
"""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from coexec.tracegraph.graph import END, START, Alternative, Fed, TraceGraph
from coexec.tracegraph.trace import Computed, Produced


def live(graph: TraceGraph) -> TraceGraph:
    """The graph without nodes that made captured tensors; the graph itself if nothing would be left."""
    captured = set(graph.captured)
    retired = {n.id for n in graph.nodes if any(o.kept and o.uid in captured for o in n.outputs)}
    if not retired:
        return graph
    alive = {n.id for n in graph.nodes} - retired
    while True:
        edges = nx.DiGraph(
            (s, t) for s, targets in graph.edges.items() for t in targets if {s, t} <= alive | {START, END}
        )
        edges.add_nodes_from((START, END))
        reachable = nx.descendants(edges, START) & nx.ancestors(edges, END)
        alternatives = {
            i: tuple(a for a in graph.nodes[i].alternatives if _possible(a, reachable)) for i in reachable
        }
        remaining = {i for i in reachable if alternatives[i]}
        if remaining == alive:
            break
        alive = remaining
    if not nx.has_path(edges, START, END):
        return graph
    nodes = tuple(
        replace(n, alternatives=alternatives[n.id]) if n.id in alive else replace(n, alternatives=())
        for n in graph.nodes
    )
    kept_edges = {
        s: tuple(t for t in targets if t in alive or t == END)
        for s, targets in graph.edges.items()
        if s in alive or s == START
    }
    return replace(graph, nodes=nodes, edges=kept_edges)


def _possible(alternative: Alternative, alive: set[int]) -> bool:
    nodes = {b.event for b in alternative.bindings if isinstance(b, Produced)}
    nodes |= {b.node for b in alternative.bindings if isinstance(b, Fed)}
    nodes |= {s.event for s in alternative.sources if isinstance(s, (Computed, Produced))}
    return nodes <= alive and (alternative.path is None or set(alternative.path) <= alive)
