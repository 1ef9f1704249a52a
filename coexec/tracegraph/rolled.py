"""The TraceGraph with its loops rolled up.

In:  a TraceGraph, in which the iterations of a loop follow one another.
Out: a sequence of nodes and loop nodes, as Terra draws it: events of one loop that are equal are one.

The symbolic graph is made of the unrolled graph; a number of iterations that varies is a path of
its own there.
"""

from __future__ import annotations

from dataclasses import dataclass

from coexec.tracegraph.graph import Node, TraceGraph
from coexec.tracegraph.loops import Loop


@dataclass(frozen=True, slots=True)
class LoopNode:
    """A loop: the nodes of its body, merged over all iterations, and the trip counts of traces."""

    loop: Loop
    body: tuple[Item, ...]
    trips: tuple[int, ...]


Item = int | LoopNode


@dataclass(frozen=True, slots=True)
class Rolled:
    """Items in topological order, and for every node the one that stands for it."""

    items: tuple[Item, ...]
    representative: dict[int, int]


def roll(graph: TraceGraph, loops: dict[int, tuple[Loop, ...]]) -> Rolled:
    """Rolls the loops of a graph up.

    Args:
        graph: the graph.
        loops: the loops around each node, outermost first, below the tape.
    """
    first: dict[object, int] = {}
    representative: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for node in graph.nodes:
        around = loops.get(node.id, ())
        identity: object = (node.function, node.location, around) if around else node.id
        representative[node.id] = first.setdefault(identity, node.id)
        members.setdefault(representative[node.id], []).append(node.id)
    items = _nest(graph, [n for n in graph.nodes if representative[n.id] == n.id], loops, members, 0)
    return Rolled(items, representative)


def _nest(
    graph: TraceGraph,
    nodes: list[Node],
    loops: dict[int, tuple[Loop, ...]],
    members: dict[int, list[int]],
    depth: int,
) -> tuple[Item, ...]:
    items: list[Item] = []
    position = 0
    while position < len(nodes):
        around = loops.get(nodes[position].id, ())
        if len(around) <= depth:
            items.append(nodes[position].id)
            position += 1
            continue
        body = []
        while (
            position < len(nodes)
            and loops.get(nodes[position].id, ())[depth : depth + 1] == around[depth : depth + 1]
        ):
            body.append(nodes[position])
            position += 1
        items.append(
            LoopNode(
                around[depth],
                _nest(graph, body, loops, members, depth + 1),
                _trips(graph, around[: depth + 1], body, loops, members),
            )
        )
    return tuple(items)


def _trips(
    graph: TraceGraph,
    around: tuple[Loop, ...],
    body: list[Node],
    loops: dict[int, tuple[Loop, ...]],
    members: dict[int, list[int]],
) -> tuple[int, ...]:
    """How often the loop ran: the n-th copy of a node that some path leaves the loop from.

    Empty for a loop that only has loops in it: their iterations hide its own.
    """
    trips = set()
    for node in body:
        if loops[node.id] != around:
            continue
        for count, member in enumerate(members[node.id], start=1):
            leaves = any(loops.get(t, ())[: len(around)] != around for t in graph.edges.get(member, ()))
            if leaves:
                trips.add(count)
    return tuple(sorted(trips))
