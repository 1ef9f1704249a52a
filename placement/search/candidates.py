"""Which subgraphs each backend could run: from its patterns and rules, and, for graph-level backends, blocks.

In:  an OpGraph, backends, a Registry.
Out: offers, each a set of operations and a backend that says it runs them as one.

Graph-level backends win on whole blocks where they lose on single operations, so blocks are offered to
them as well: stretches of the graph between places where few tensors are alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.backends.base import Backend
from placement.backends.fusion import ELEMENTWISE, HEAVY, VIEWS
from placement.errors import RuleExplosion
from placement.graph import OpGraph, mask_of
from placement.patterns.generator import generate
from placement.patterns.matcher import match
from placement.registry import REFERENCE, Registry


@dataclass
class Offers:
    """What was found."""

    masks: dict[str, dict[int, str]] = field(default_factory=dict)
    """For each backend the sets, and how each was found: `pattern`, `rule`, `block` or `graph`."""
    random: int = 0
    """Operations that stay on ATen because they draw random numbers."""
    notes: list[str] = field(default_factory=list)
    """What went wrong on the way."""

    def add(self, backend: str, mask: int, origin: str) -> None:
        """Adds a set; the first origin stays."""
        if mask & self.random and backend != REFERENCE:
            return
        self.masks.setdefault(backend, {}).setdefault(mask, origin)


def offers(graph: OpGraph, backends: Sequence[Backend], registry: Registry) -> Offers:
    """Every subgraph that one of the backends says it runs.

    Raises:
        PatternError: if a rule raises or gives nonsense.
    """
    found = Offers(random=graph.random)
    intervals = blocks(graph)
    for backend in backends:
        for pattern in registry.patterns(backend.name):
            for mask in match(graph, pattern):
                found.add(backend.name, mask, "pattern")
        for rule in registry.rules(backend.name):
            try:
                for mask in generate(graph, rule):
                    found.add(backend.name, mask, "rule")
            except RuleExplosion as error:
                found.notes.append(f"{backend.name}: {error} Its fused groups are left out.")
        if backend.level == "graph":
            for mask in intervals:
                found.add(backend.name, mask, "block")
            found.add(backend.name, graph.all, "graph")
    return found


def blocks(graph: OpGraph, *, widest: int = 2) -> list[int]:
    """Blocks of the graph, and neighbouring blocks in twos, fours and so on.

    A block ends where at most `widest` tensors are alive (one, if that gives at least four blocks), holds
    at least one heavy operation, and takes the elementwise operations behind it along.
    """
    for alive in range(1, widest + 1):
        ends = _ends(graph, alive)
        if len(ends) > 4:
            break
    found: dict[int, None] = {}
    length = 1
    while length < len(ends):
        for first in range(0, len(ends) - length, max(1, length // 2)):
            found[mask_of(range(ends[first], ends[first + length]))] = None
        length *= 2
    return [mask for mask in found if mask != graph.all]


def _ends(graph: OpGraph, alive: int) -> list[int]:
    """Positions in topological order at which blocks begin and end, first and last included."""
    last_use = [
        len(graph) if graph.leaving >> i & 1 else graph.readers[i].bit_length() - 1 for i in range(len(graph))
    ]
    ends = [0]
    heavy = False
    for position, op in enumerate(graph.ops):
        live = sum(last_use[i] >= position for i in range(position))
        joins = op.name in ELEMENTWISE or op.name in VIEWS
        if heavy and not joins and live <= alive:
            ends.append(position)
            heavy = False
        heavy = heavy or op.name in HEAVY
    if len(ends) > 1 and not heavy:
        ends.pop()
    return [*ends, len(graph)]
