"""Case assignment: a TraceGraph as an ordered list of switch-cases.

In:  the edges of a graph with one `START` and one `END`.
Out: switch-cases; executing one case of each, in order, executes any path through the graph.

Source: Terra, Algorithm 1, definitions 1 to 6 and theorem 1. One thing is made explicit here that
the text leaves open: a path may end while others go on. Its edge to `END` is carried along as the
control edge of an empty case, so that exactly one case of every switch-case belongs to every path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coexec.tracegraph.graph import END, START

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Case:
    """A linear chain of nodes, executed when the path took one of the control edges."""

    block: tuple[int, ...]
    control_edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class SwitchCase:
    """Mutually exclusive cases."""

    cases: tuple[Case, ...]


def assign_cases(edges: Mapping[int, Sequence[int]]) -> tuple[SwitchCase, ...]:
    """Algorithm 1.

    Args:
        edges: the children of every node and of `START`; acyclic, every node on a path to `END`.
    """
    incoming: dict[int, list[Edge]] = {}
    for source, targets in edges.items():
        for target in targets:
            incoming.setdefault(target, []).append((source, target))

    switch_cases = []
    frontier: list[Edge] = [(START, target) for target in edges[START]]
    while any(target != END for _, target in frontier):
        pending = set(frontier)
        cases = []
        next_frontier: list[Edge] = []
        for head in dict.fromkeys(target for _, target in frontier):
            control_edges = tuple(e for e in frontier if e[1] == head)
            if head == END or not pending.issuperset(incoming[head]):
                cases.append(Case((), control_edges))
                next_frontier += control_edges
                continue
            block = [head]
            while True:
                targets = edges[block[-1]]
                if len(targets) != 1 or targets[0] == END or len(incoming[targets[0]]) != 1:
                    break
                block.append(targets[0])
            cases.append(Case(tuple(block), control_edges))
            next_frontier += [(block[-1], target) for target in edges[block[-1]]]
        switch_cases.append(SwitchCase(tuple(cases)))
        frontier = next_frontier
    return tuple(switch_cases)
