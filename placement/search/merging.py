"""Adjacent parts of one graph-level backend, joined where measuring says that joined is faster.

A graph-level backend optimizes across operations, so what a merged part costs is not the sum of its
parts' costs: it is compiled and measured as one (Collage, section 2.4.3).
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.backends.base import Backend
from placement.graph import OpGraph
from placement.measuring.measurer import Measurer
from placement.measuring.protocol import Measurement
from placement.placements import Part, Placement, merged
from placement.search.costs import Costs


def merge_measured(
    graph: OpGraph,
    placement: Placement,
    backends: Sequence[Backend],
    costs: Costs,
    measurer: Measurer,
    deadline: float,
    switch_s: dict[str, float],
) -> Placement:
    """The placement with those merged parts that cost less than what they are merged from."""
    by_name = {b.name: b for b in backends if b.level == "graph"}
    parts: list[Part] = []
    for part in merged(graph, placement, by_name).parts:
        pieces = [p for p in placement.parts if p.mask & part.mask]
        if len(pieces) == 1:
            parts.append(part)
            continue
        apart = sum(costs.of[p.backend, p.mask].cost_s + switch_s.get(p.backend, 0.0) for p in pieces)
        together = _cost(part, by_name[part.backend], costs, measurer, deadline)
        if together is not None and together.ok and together.cost_s + switch_s[part.backend] < apart:
            parts.append(part)
        else:
            parts += pieces
    return Placement.of(graph, parts)


def _cost(
    part: Part, backend: Backend, costs: Costs, measurer: Measurer, deadline: float
) -> Measurement | None:
    if (part.backend, part.mask) not in costs.of:
        known = measurer.known(backend, part.mask)
        if known is None:
            known = measurer.measure(part.mask, [backend], deadline).get(backend.name)
        if known is None:
            return None
        costs.of[part.backend, part.mask] = known
    return costs.of[part.backend, part.mask]
