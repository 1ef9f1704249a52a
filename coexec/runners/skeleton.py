"""The plan of an iteration in the co-execution phase: what the PythonRunner walks along.

In:  a TraceGraph and the program made of it.
Out: `Skeleton`, immutable, shared by all iterations until the graph changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coexec.runners.random_state import generators_of
from coexec.tracegraph.calls import number_class
from coexec.tracegraph.graph import END, Node, TraceGraph
from coexec.tracegraph.numbers import same_number
from coexec.tracegraph.program import Program
from coexec.tracegraph.trace import Number


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A live TraceGraph, its program, the children of each node, and the generators it draws from."""

    graph: TraceGraph
    program: Program
    children: dict[int, tuple[Node, ...]]
    generators: tuple[torch.Generator, ...]


def make_skeleton(graph: TraceGraph, program: Program) -> Skeleton:
    """Pairs a graph with its program."""
    children = {
        source: tuple(graph.nodes[t] for t in targets if t != END) for source, targets in graph.edges.items()
    }
    return Skeleton(graph, program, children, generators_of(program))


def numbers_fit(node: Node, numbers: list[Number]) -> bool:
    """Whether an event's numbers are those of a node, or may be fed to it."""
    for slot, number in zip(node.numbers, numbers, strict=True):
        if slot.classes is None:
            if not same_number(slot.value, number):
                return False
        elif number_class(number) not in slot.classes:
            return False
    return True
