"""Placement: which backend runs which operations of a graph.

In:  an OpGraph.
Out: parts, each a set of operations on one backend, in an order in which they can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import networkx as nx

from placement.errors import PlacementError
from placement.graph import OpGraph, bits


@dataclass(frozen=True, slots=True)
class Part:
    """Operations that run as one on a backend."""

    mask: int
    backend: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Parts that cover every operation once, in an order in which they can run."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(graph: OpGraph, parts: Iterable[Part]) -> Placement:
        """Sorts parts into an order in which they can run.

        Raises:
            PlacementError: if they overlap, leave operations out, or wait for each other in a circle.
        """
        parts = tuple(parts)
        order = _order(graph, parts)
        return Placement(tuple(parts[i] for i in order))

    @staticmethod
    def single(graph: OpGraph, backend: str) -> Placement:
        """Everything as one part of one backend."""
        return Placement((Part(graph.all, backend),))

    def backends(self) -> tuple[str, ...]:
        """The backends that occur, in order of their first part."""
        return tuple(dict.fromkeys(part.backend for part in self.parts))

    def limited(self, graph: OpGraph, fuel: int, reference: str = "aten") -> Placement:
        """The same with only the first `fuel` parts off the reference backend, the others on it."""
        left = fuel
        parts: list[Part] = []
        for part in self.parts:
            if part.backend == reference:
                parts.append(part)
            elif left > 0:
                left -= 1
                parts.append(part)
            else:
                parts += [Part(1 << i, reference) for i in bits(part.mask)]
        return Placement.of(graph, parts)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data."""
        return [{"backend": p.backend, "ops": list(bits(p.mask))} for p in self.parts]

    @staticmethod
    def from_json(graph: OpGraph, data: list[dict[str, Any]]) -> Placement:
        """What `to_json` gave.

        Raises:
            PlacementError: if it doesn't fit the graph.
        """
        parts = []
        for item in data:
            mask = 0
            for i in item["ops"]:
                if not 0 <= i < len(graph):
                    raise PlacementError(f"operation {i} is not in a graph of {len(graph)} operations")
                mask |= 1 << i
            parts.append(Part(mask, item["backend"]))
        return Placement.of(graph, parts)


def _order(graph: OpGraph, parts: tuple[Part, ...]) -> list[int]:
    owner: dict[int, int] = {}
    for number, part in enumerate(parts):
        for i in bits(part.mask):
            if i in owner:
                raise PlacementError(f"{graph.ops[i]} is in two parts: {parts[owner[i]]} and {part}")
            owner[i] = number
    left = graph.all & ~sum(part.mask for part in parts)
    if left:
        raise PlacementError(f"no part has {', '.join(str(graph.ops[i]) for i in bits(left))}")
    quotient = quotient_of(graph, owner, len(parts))
    first = [next(bits(part.mask)) for part in parts]
    try:
        return list(nx.lexicographical_topological_sort(quotient, key=first.__getitem__))
    except nx.NetworkXUnfeasible:
        circle = [edge[0] for edge in nx.find_cycle(quotient)]
        raise PlacementError(
            "these parts wait for each other: " + "; ".join(str(graph.ops[first[p]]) for p in circle)
        ) from None


def quotient_of(graph: OpGraph, owner: dict[int, int], count: int) -> nx.DiGraph[int]:
    """The graph of parts: an edge where one reads what another makes."""
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(range(count))
    for op in graph.ops:
        for i in bits(graph.reads[op.index]):
            if owner[i] != owner[op.index]:
                quotient.add_edge(owner[i], owner[op.index])
    return quotient


def merged(graph: OpGraph, placement: Placement, backends: Iterable[str]) -> Placement:
    """Joins parts of one backend where one reads from the other, until nothing joins any more.

    Two parts can be joined if no path from one to the other goes through a third.
    """
    owner = {i: number for number, part in enumerate(placement.parts) for i in bits(part.mask)}
    quotient = quotient_of(graph, owner, len(placement.parts))
    masks = dict(enumerate(part.mask for part in placement.parts))
    names = [part.backend for part in placement.parts]
    mergeable = set(backends)
    pending = [edge for edge in quotient.edges if names[edge[0]] == names[edge[1]] in mergeable]
    while pending:
        source, target = pending.pop(0)
        if not quotient.has_edge(source, target):
            continue
        quotient.remove_edge(source, target)
        if nx.has_path(quotient, source, target):
            quotient.add_edge(source, target)
            continue
        masks[source] |= masks.pop(target)
        nx.contracted_nodes(quotient, source, target, self_loops=False, copy=False)
        name = names[source]
        pending += [(a, source) for a in quotient.predecessors(source) if names[a] == name in mergeable]
        pending += [(source, b) for b in quotient.successors(source) if names[b] == name in mergeable]
    return Placement.of(graph, (Part(mask, names[number]) for number, mask in masks.items()))
