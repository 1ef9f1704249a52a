"""The points at which a model can be cut in two.

In:  a profiled graph.
Out: its `State`s, each a set of nodes that holds all predecessors of its members (an ideal), with sums over
    it.

A stage is the difference of two states, one inside the other. For a chain the states are its prefixes. A
graph has as many as there are ways for its branches to have come different lengths.

Source: the antichain construction of PipeDream's published optimizer; an antichain stands for the ideal below
it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import networkx as nx

from pipeline.errors import GraphError
from pipeline.graph import ProfiledGraph, as_digraph, without

MOST = 5000
"""More states than this take a planner hours; parallel branches multiply them."""


@dataclass(frozen=True, slots=True)
class State:
    """An ideal of the graph.

    Attributes:
        nodes: Its nodes.
        seconds: Their forward and backward time.
        parameter_bytes: Their parameters.
        activation_bytes: Their outputs, all of them.
        boundary_bytes: The outputs that nodes outside read.
        counted_bytes: The outputs that PipeDream's published optimizer counts at the boundary: those of the
            maximal nodes, and of every node below one of them that also leads past it. In parallel branches
            that is more than what crosses.
    """

    nodes: frozenset[str]
    seconds: float
    parameter_bytes: float
    activation_bytes: float
    boundary_bytes: float
    counted_bytes: float


def without_ends(graph: ProfiledGraph) -> ProfiledGraph:
    """The graph without what is no choice of the planner's: inputs, and items of tuples that nobody reads."""
    digraph = as_digraph(graph.model)
    ends = [
        node.id
        for node in graph.model.nodes
        if (not digraph.in_degree(node.id) and node.description.startswith("Input"))
        or (not digraph.out_degree(node.id) and node.description.startswith("__getitem__"))
    ]
    return without(graph, ends)


def states(graph: ProfiledGraph) -> tuple[State, ...]:
    """All states that contain the first source, smallest first; the last one is the whole model.

    Raises:
        GraphError: The graph is empty, falls apart, or has more than `MOST` states.
    """
    digraph = as_digraph(graph.model)
    if not digraph:
        raise GraphError(f"{graph.model.name}: there is nothing to cut; the graph has no nodes.")
    if not nx.is_weakly_connected(digraph):
        raise GraphError(f"{graph.model.name}: the graph falls apart; it can't be cut into one pipeline.")
    below = {v: frozenset(nx.ancestors(digraph, v)) | {v} for v in digraph}
    first = next(node.id for node in graph.model.nodes if not digraph.in_degree(node.id))
    found = {below[first]}
    queue = deque(found)
    while queue:
        ideal = queue.popleft()
        for v in {w for u in ideal for w in digraph.successors(u)} - ideal:
            larger = ideal | below[v]
            if larger not in found:
                if len(found) == MOST:
                    raise GraphError(
                        f"{graph.model.name}: there are more than {MOST} ways to cut the graph. Merge nodes"
                        " of parallel branches."
                    )
                found.add(larger)
                queue.append(larger)
    order = {node.id: i for i, node in enumerate(graph.model.nodes)}
    ordered = sorted(found, key=lambda ideal: (len(ideal), sorted(map(order.__getitem__, ideal))))
    return tuple(_state(graph, digraph, below, ideal) for ideal in ordered)


def _state(
    graph: ProfiledGraph,
    digraph: nx.DiGraph[str],
    below: dict[str, frozenset[str]],
    ideal: frozenset[str],
) -> State:
    costs = graph.cost_of()
    inside = [node.id for node in graph.model.nodes if node.id in ideal]
    maximal = [v for v in inside if ideal.isdisjoint(digraph.successors(v))]
    crossing = [v for v in inside if any(w not in ideal for w in digraph.successors(v))]
    leading_past = {
        u for v in maximal for u in below[v] - {v} if any(w not in below[v] for w in digraph.successors(u))
    }
    total = graph.total(inside)
    return State(
        ideal,
        (total.forward_ms + total.backward_ms) / 1e3,
        total.parameter_bytes,
        total.output_bytes,
        sum(costs[v].output_bytes for v in crossing),
        sum(costs[v].output_bytes for v in [*maximal, *leading_past]),
    )
