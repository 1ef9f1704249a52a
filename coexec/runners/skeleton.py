"""The plan of an iteration in the co-execution phase: what the PythonRunner walks along.

In:  a TraceGraph and the program made of it.
Out: `Skeleton`, immutable, shared by all iterations until the graph changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from coexec.runners.random_state import generators_of
from coexec.runners.unseen import Unseen
from coexec.runners.walker import make_walker
from coexec.tracegraph.graph import END, Captured, Node, NumberOrigin, TraceGraph
from coexec.tracegraph.interning import Interner, captured_of, interned, outputs_of
from coexec.tracegraph.numbers import agreements
from coexec.tracegraph.program import Program
from coexec.tracegraph.trace import Produced


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A live TraceGraph and its program, and what every iteration needs of them.

    Attributes:
        graph: the TraceGraph, its equal parts interned.
        program: what the GraphRunner executes.
        children: the nodes that may follow each node.
        generators: the random number generators that the program draws from.
        outputs: the binding of each node's outputs.
        captured: the binding of each captured tensor.
        bound: which of these tensors the program reads.
        agreements: for each node, numbers that have to agree because traces cannot tell them apart.
        unseen: what nodes do for sizes that no trace had.
        walker: the native hot path, None where there is none.
        passes: backward passes in pieces that iterations have gone through, see `pieces`.
    """

    graph: TraceGraph
    program: Program
    children: dict[int, tuple[Node, ...]]
    generators: tuple[torch.Generator, ...]
    outputs: tuple[tuple[Produced, ...], ...]
    captured: tuple[Captured, ...]
    bound: tuple[int, ...]
    agreements: dict[int, tuple[tuple[NumberOrigin, ...], ...]]
    unseen: Unseen
    walker: Any
    passes: dict[Hashable, tuple[tuple[Node, int], ...]] = field(default_factory=dict)


def make_skeleton(graph: TraceGraph, program: Program) -> Skeleton:
    """Pairs a graph with its program."""
    one = Interner()
    graph = interned(graph, one)
    children = {
        source: tuple(graph.nodes[t] for t in targets if t != END) for source, targets in graph.edges.items()
    }
    outputs = outputs_of(graph, one)
    agreed = {n.id: found for n in graph.nodes if (found := agreements(n.operations))}
    unseen = Unseen(graph)
    walker = make_walker(graph, program, children, outputs, agreed, unseen)
    generators = generators_of(program)
    captured = captured_of(graph, one)
    bound = tuple(program.captured)
    return Skeleton(graph, program, children, generators, outputs, captured, bound, agreed, unseen, walker)
