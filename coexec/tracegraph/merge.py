"""Merging traces into a TraceGraph.

In:  the traces of a program.
Out: one graph that covers all of them.

What varies between iterations (external tensors, numbers, sizes) shows only when traces are laid side by
side. So merging begins with the first trace whenever another one is there; unless that one changes nothing of
what is known of the others. Then it is added to what the latest merge has come to (see `MergeMemory`).

Source: Terra, section 3.2.2 ("TraceGraph").
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coexec.tracegraph.ambiguity import conflicting_captures, indistinct
from coexec.tracegraph.builder import Builder, Identity, Premises, identity_of
from coexec.tracegraph.callbacks import is_stopped
from coexec.tracegraph.closure import closed
from coexec.tracegraph.freezing import frozen
from coexec.tracegraph.generalize import Generalized, generalize
from coexec.tracegraph.generalize_calls import GeneralCalls, Looks, generalize_calls
from coexec.tracegraph.graph import (
    UNKNOWN,
    Captured,
    Seen,
    TraceGraph,
    node_of,
    renumbered_step,
    symbols_of,
    varying_captures,
)
from coexec.tracegraph.numbers import are_those
from coexec.tracegraph.own_sizes import with_own_sizes
from coexec.tracegraph.sizes import symbol
from coexec.tracegraph.trace import TensorMeta, Trace, takes_one_value_twice


class Indistinct(Exception):
    """Traces in which the same calls of Python, on the same path, do different things."""


def merge(traces: Sequence[Trace], memory: MergeMemory | None = None, *, guess: bool = True) -> TraceGraph:
    """Merges traces, in order, into one graph that covers all of them.

    Args:
        traces: of one program.
        memory: of earlier merges of traces of this program.
        guess: whether graphs of backward passes in pieces get what is like what they have.

    Raises:
        Indistinct: if no running iteration could be told to be like one trace, or like another.
    """
    memory = memory or MergeMemory()
    apart = any(e.piece is not None for t in traces for e in t.events)
    by_call = apart and not any(e.by_path for t in traces for e in t.events)
    general = generalize_calls(traces, memory.looks) if by_call else generalize(traces)
    traces = general.traces
    hooks = {e.uid: e.hooks for t in traces for e in t.externals}
    premises = _premises(traces, memory.facts(traces), apart=apart)
    while True:
        builder = memory.builder(traces, premises)
        conflicting = conflicting_captures(builder)
        alike = indistinct(builder)
        if alike & premises.path_dependent:
            raise Indistinct
        ambiguous = builder.ambiguous | alike
        if not conflicting and not ambiguous:
            graph, new_id = frozen(builder)
            graph = replace(
                graph,
                symbols=general.symbols,
                hooks=tuple(hooks[uid] for uid in graph.captured),
                paths=_paths(builder, new_id) if apart else (),
                general=isinstance(general, Generalized) and general.latest,
            )
            if apart and guess:
                graph = closed(graph)
            if isinstance(general, Generalized):
                graph = replace(graph, seen=_seen(graph, builder, new_id, general))
            else:
                values = _by_node(builder, new_id, general)
                graph = with_own_sizes(graph, values, _captured_metas(graph, traces))
            conflicting = {graph.captured[index] for index in varying_captures(graph)}
            if not conflicting:
                memory.keep(builder, traces)
                return graph
        premises = replace(
            premises,
            captured=premises.captured - conflicting,
            path_dependent=premises.path_dependent | ambiguous,
        )


def agree_on_hooks(trace: Trace, other: Trace) -> bool:
    """Whether two traces found the same hooks on tensors that both use, so that backward passes are alike."""
    hooks = {e.uid: e.hooks for e in trace.externals}
    return all(hooks.get(e.uid, e.hooks) == e.hooks for e in other.externals)


# --- what is known before traces are merged ---


@dataclass(frozen=True, slots=True)
class _Facts:
    """What there is to know of a trace by itself.

    Attributes:
        path_dependent: events of which it depends on the events before them what they read.
        repeated: events that come several times in one place, that is in a loop.
    """

    path_dependent: frozenset[Identity]
    repeated: frozenset[Identity]


def _facts(trace: Trace) -> _Facts:
    # Whether a call is stopped depends on what has been saved before it.
    on_path = [e for e in trace.events if is_stopped(e.result) or takes_one_value_twice(e, trace)]
    count = Counter(identity_of(e) for e in trace.events if e.piece is None)
    repeated = frozenset(identity for identity, n in count.items() if n > 1)
    return _Facts(frozenset(map(identity_of, on_path)), repeated)


def _premises(traces: Sequence[Trace], facts: Sequence[_Facts], *, apart: bool) -> Premises:
    seen = Counter(uid for t in traces for uid in {e.uid for e in t.externals})
    parameters = {e.uid for t in traces for e in t.externals if e.parameter}
    exposed = {e.uid for t in traces for e in t.externals if e.exposed}
    captured = {uid for uid, n in seen.items() if n > 1 or uid in parameters} - exposed - _restrided(traces)
    return Premises(
        apart,
        frozenset(captured),
        frozenset().union(*[f.path_dependent for f in facts]),
        frozenset().union(*[f.repeated for f in facts]) if apart else frozenset(),
    )


def _restrided(traces: Sequence[Trace]) -> set[int]:
    """External tensors that lie in memory in several ways: a captured tensor has one."""
    layouts: dict[int, dict[object, object]] = defaultdict(dict)
    found: set[int] = set()
    for external in (e for trace in traces for e in trace.externals):
        layout = (external.meta.stride, external.meta.dtype)
        if layouts[external.uid].setdefault(external.meta.shape, layout) != layout:
            found.add(external.uid)
    return found


# --- what a graph knows of its traces ---


def _paths(builder: Builder, new_id: Mapping[int, int]) -> tuple[frozenset[int], ...]:
    paths = (frozenset(renumbered_step(s, new_id) for s in path) for path in builder.paths)
    return tuple(dict.fromkeys(paths))


def _seen(
    graph: TraceGraph, builder: Builder, new_id: Mapping[int, int], general: Generalized
) -> dict[int, Seen]:
    """Nodes with symbols, and the values that these had in traces. A backward pass depends on all."""
    visits = [
        ({new_id[node_of(s)] for s in path}, dict(assignment))
        for path, assignment in zip(builder.paths, general.assignments, strict=True)
        if assignment
    ]
    found = {}
    for node in graph.nodes:
        symbols = symbols_of(node)
        if symbols:
            every = range(len(graph.symbols)) if node.by_path else sorted(symbols)
            here = [
                of_trace
                for nodes, of_trace in visits
                if node.id in nodes and (node.by_path or symbols <= of_trace.keys())
            ]
            values = frozenset(tuple([of_trace.get(s, UNKNOWN) for s in every]) for of_trace in here)
            found[node.id] = Seen(tuple(map(symbol, every)), values, here[0] if here else {})
    return found


def _captured_metas(graph: TraceGraph, traces: Sequence[Trace]) -> dict[Captured, TensorMeta]:
    """The metadata of captured tensors that have the same in all traces."""
    found: dict[int, set[TensorMeta]] = defaultdict(set)
    for external in (e for trace in traces for e in trace.externals):
        found[external.uid].add(external.meta)
    return {
        Captured(i): next(iter(found[uid])) for i, uid in enumerate(graph.captured) if len(found[uid]) == 1
    }


def _by_node(
    builder: Builder, new_id: Mapping[int, int], general: GeneralCalls
) -> list[dict[int, dict[int, int]]]:
    """For each trace, by node: the values of its symbols."""
    return [
        {new_id[node_of(path[event])]: of_event for event, of_event in of_trace.items()}
        for path, of_trace in zip(builder.paths, general.assignments, strict=True)
    ]


# --- what is kept from one merge to the next ---


class MergeMemory:
    """What merges of more and more traces have found out.

    A merge with it comes to the graph that it would come to without it.
    """

    def __init__(self) -> None:
        self.looks = Looks()
        self._facts: list[tuple[Trace, _Facts]] = []
        self._merged: tuple[Builder, Sequence[Trace]] | None = None  # nothing was wrong with it

    def facts(self, traces: Sequence[Trace]) -> list[_Facts]:
        """What there is to know of each trace by itself."""
        known = _in_common([t for t, _ in self._facts], traces)
        self._facts = [*self._facts[:known], *[(t, _facts(t)) for t in traces[known:]]]
        return [facts for _, facts in self._facts]

    def builder(self, traces: Sequence[Trace], premises: Premises) -> Builder:
        """A builder to which all traces have been added."""
        builder = self._latest(traces, premises) or Builder(premises)
        for trace in traces[len(builder.paths) :]:
            builder.add(trace)
        return builder

    def keep(self, builder: Builder, traces: Sequence[Trace]) -> None:
        """Remembers a builder of a graph."""
        self._merged = builder, traces

    def _latest(self, traces: Sequence[Trace], premises: Premises) -> Builder | None:
        """The builder of the latest graph, if a new one would come to the same."""
        merged, self._merged = self._merged, None  # it is not worth keeping if adding a trace fails
        if merged is None:
            return None
        builder, before = merged
        goes_on = _in_common(before, traces) == len(before) and builder.goes_on_with(premises)
        return builder if goes_on else None


def _in_common(before: Sequence[Trace], traces: Sequence[Trace]) -> int:
    """How many traces, from the first one on, are of the very same events."""
    return sum(1 for _ in itertools.takewhile(_are_same, zip(before, traces, strict=False)))


def _are_same(traces: tuple[Trace, Trace]) -> bool:
    one, other = traces
    return one is other or (one.externals is other.externals and are_those(one.events, other.events))
