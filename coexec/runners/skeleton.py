"""The plan of an iteration in the co-execution phase: what the PythonRunner walks along.

In:  a TraceGraph and the program made of it.
Out: `Skeleton`, immutable, shared by all iterations until the graph changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from coexec.tracegraph.calls import number_class
from coexec.tracegraph.graph import END, Node, TraceGraph
from coexec.tracegraph.numbers import same_number
from coexec.tracegraph.program import NodePlan, Program
from coexec.tracegraph.trace import Number


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A live TraceGraph, its program, and the children of each node as nodes."""

    graph: TraceGraph
    program: Program
    children: dict[int, tuple[Node, ...]]

    def plan(self, node: Node) -> NodePlan:
        """What to send at a node."""
        return self.program.plans[node.id]


def make_skeleton(graph: TraceGraph, program: Program) -> Skeleton:
    """Pairs a graph with its program."""
    children = {
        source: tuple(graph.nodes[t] for t in targets if t != END) for source, targets in graph.edges.items()
    }
    return Skeleton(graph, program, children)


def numbers_fit(node: Node, numbers: list[Number]) -> bool:
    """Whether an event's numbers are those of a node, or may be fed to it."""
    for slot, number in zip(node.numbers, numbers, strict=True):
        if slot.classes is None:
            if not same_number(slot.value, number):
                return False
        elif number_class(number) not in slot.classes:
            return False
    return True
