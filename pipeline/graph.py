"""What a model is to the planner: nodes, edges between them, and what each node costs.

In:  the structure of a model (`ModelGraph`) and one measured or computed `Cost` for each node.
Out: `ProfiledGraph`, the only thing about a model that planners read.

Both are checked when they are made: ids are unique, edges join known nodes, there is no cycle, no cost is
negative. So whoever holds one may rely on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from math import isfinite

import networkx as nx

from pipeline.errors import GraphError


@dataclass(frozen=True, slots=True)
class Node:
    """An operator or a module block."""

    id: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one node costs for one micro-batch.

    Attributes:
        forward_ms: Time of the forward pass, milliseconds.
        backward_ms: Time of the backward pass, milliseconds.
        output_bytes: Size of the node's output.
        parameter_bytes: Size of its parameters.
        saved_bytes: What it keeps from its forward pass for its backward pass.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """Nodes and the edges along which their outputs flow; a directed acyclic graph."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for node in self.nodes:
            if node.id in known:
                raise GraphError(f"{self.name}: node {node.id!r} appears twice. Node ids must be unique.")
            known.add(node.id)
        for source, target in self.edges:
            for end in (source, target):
                if end not in known:
                    raise GraphError(
                        f"{self.name}: edge {source!r} -> {target!r} joins {end!r}, which is no node."
                    )
        if cycle := find_cycle(self.edges):
            raise GraphError(f"{self.name}: the edges form a cycle: {' -> '.join(map(str, cycle))}.")


@dataclass(frozen=True, slots=True)
class ProfiledGraph:
    """A model graph with the cost of each node; `costs[i]` belongs to `model.nodes[i]`.

    Attributes:
        model: The structure.
        costs: One cost a node, for one micro-batch of `samples` samples.
        samples: Samples in the micro-batch that the costs are for.
    """

    model: ModelGraph
    costs: tuple[Cost, ...]
    samples: int = 1

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.model.nodes):
            raise GraphError(f"{self.model.name}: {len(self.costs)} costs for {len(self.model.nodes)} nodes.")
        if self.samples < 1:
            raise GraphError(
                f"{self.model.name}: the profile's micro-batch has {self.samples} samples; at least 1."
            )
        for node, cost in zip(self.model.nodes, self.costs, strict=True):
            for f in fields(cost):
                value = getattr(cost, f.name)
                if not (isfinite(value) and value >= 0):
                    raise GraphError(
                        f"{self.model.name}: node {node.id!r} has {f.name} = {value}; give a number >= 0."
                    )

    def cost_of(self) -> dict[str, Cost]:
        """Costs by node id."""
        return {node.id: cost for node, cost in zip(self.model.nodes, self.costs, strict=True)}

    def total(self, ids: Iterable[str] | None = None) -> Cost:
        """Sum of the costs of the given nodes, or of all of them."""
        by_id = self.cost_of()
        return sum((by_id[i] for i in (by_id if ids is None else ids)), Cost())


def as_digraph(graph: ModelGraph) -> nx.DiGraph[str]:
    """The structure as networkx knows it, nodes in their order."""
    digraph: nx.DiGraph[str] = nx.DiGraph()
    digraph.add_nodes_from(node.id for node in graph.nodes)
    digraph.add_edges_from(graph.edges)
    return digraph


def find_cycle(edges: Iterable[tuple[object, object]]) -> list[object]:
    """The nodes of a cycle, the first one repeated at the end; empty when there is none."""
    try:
        cycle = nx.find_cycle(nx.DiGraph(list(edges)))
    except nx.NetworkXNoCycle:
        return []
    return [cycle[0][0], *(edge[1] for edge in cycle)]


def without(graph: ProfiledGraph, ids: Iterable[str]) -> ProfiledGraph:
    """The graph without some nodes and the edges at them; the others keep their order and costs."""
    gone = set(ids)
    kept = [(n, c) for n, c in zip(graph.model.nodes, graph.costs, strict=True) if n.id not in gone]
    model = ModelGraph(
        graph.model.name,
        tuple(n for n, _ in kept),
        tuple(edge for edge in graph.model.edges if gone.isdisjoint(edge)),
    )
    return ProfiledGraph(model, tuple(c for _, c in kept), graph.samples)


def chain_graph(name: str, costs: Mapping[str, Cost], *, samples: int = 1) -> ProfiledGraph:
    """A model whose nodes follow each other in the given order."""
    ids = list(costs)
    model = ModelGraph(name, tuple(Node(i) for i in ids), tuple(pairwise(ids)))
    return ProfiledGraph(model, tuple(costs.values()), samples)
