"""What one more trace has done to a TraceGraph.

In:  the graph before and after a trace was merged into it.
Out: whether the trace was covered, and if not, whether the graph comes closer to the program.
"""

from __future__ import annotations

from collections import Counter

from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.trace import Trace

#: A trace recombines what others had if at most one of so many of its events is new.
ONE_NEW_IN = 5
#: Traces that are enough if the latest differs from those before it in numbers alone.
ENOUGH = 3


def covered(before: TraceGraph | None, after: TraceGraph) -> bool:
    """Whether there was nothing in a trace that the graph did not have, or only another value of a number."""
    if before is None or after.general:
        return after.general
    return _shape(before) == _shape(after) or _only_numbers_vary(before, after)


def _only_numbers_vary(before: TraceGraph, after: TraceGraph) -> bool:
    """Whether numbers vary that never did before: from now on they may be any.

    In the first traces more than that is new, and shows in the next one.
    """
    if after.traces < ENOUGH or before.symbols != after.symbols:
        return False
    return _shape(before, with_numbers=False) == _shape(after, with_numbers=False)


def recombines(before: TraceGraph, after: TraceGraph, trace: Trace) -> bool:
    """Whether a trace is made of events that other traces had: soon the graph will have all of them."""
    return (len(after.nodes) - len(before.nodes)) * ONE_NEW_IN <= len(trace.events)


def only_generalised(before: TraceGraph, after: TraceGraph) -> bool:
    """Whether a trace brought no event that was new.

    Its events came in another order, or numbers vary that never did before. There are finitely many of them,
    so they are no sign that the program has no graph. (Sizes that data decides about are often such a sign.)
    """
    events, events_now = (
        Counter((n.location, len(n.alternatives)) for n in g.nodes) for g in (before, after)
    )
    ways, ways_now = (sum(map(len, g.edges.values())) for g in (before, after))
    same_sizes = before.symbols == after.symbols
    return events == events_now and (ways < ways_now or (same_sizes and _shape(before) != _shape(after)))


def differ(before: TraceGraph | None, after: TraceGraph | None) -> bool:
    """Whether a trace changed what a graph computes; where it did not, the graph fails again on it."""
    if before is None or after is None:
        return True
    return before.symbols != after.symbols or _shape(before) != _shape(after)


def _shape(graph: TraceGraph, *, with_numbers: bool = True) -> object:
    """What has to stay the same for a trace to count as covered."""
    nodes = tuple(
        (n.name, with_numbers and n.numbers, len(n.alternatives), tuple(o.kept for o in n.outputs))
        for n in graph.nodes
    )
    return nodes, dict(graph.edges)
