"""Merging traces into a TraceGraph, as Terra's GraphGenerator does.

A trace is followed from `START`. Each event is matched with a child of the latest matched node; else
it is merged back into an equal node elsewhere if that keeps the graph acyclic; else it becomes a new
node. Merging is repeated from the first trace on whenever a trace is added: what varies between
iterations (external tensors, numbers, sizes) shows only when traces are laid side by side.

Source: Terra, section 3.2.2 ("TraceGraph").
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from coexec.tracegraph import functions
from coexec.tracegraph.callbacks import is_stopped
from coexec.tracegraph.closure import closed
from coexec.tracegraph.generalize import Generalized, generalize
from coexec.tracegraph.generalize_calls import GeneralCalls, Looks, generalize_calls
from coexec.tracegraph.graph import (
    END,
    START,
    UNKNOWN,
    Alternative,
    Captured,
    Fed,
    FedNumber,
    Node,
    NodeBinding,
    NodeSource,
    NumberSlot,
    Seen,
    TraceGraph,
    is_shaped_by_data,
    node_of,
    renumbered_step,
    step_of,
    symbols_of,
    varying_captures,
)
from coexec.tracegraph.numbers import are_those, same_number, same_sizes, unify, unify_slots, unused, varying
from coexec.tracegraph.optimizers import counts_of
from coexec.tracegraph.order import Groups, in_order, turned_around
from coexec.tracegraph.own_sizes import with_own_sizes
from coexec.tracegraph.sizes import Size, symbol
from coexec.tracegraph.tape import Passed, Piece, at_of
from coexec.tracegraph.trace import (
    Computed,
    Event,
    External,
    Input,
    Number,
    Operation,
    Output,
    Produced,
    Source,
    TensorMeta,
    Trace,
    takes_one_value_twice,
    with_leaves,
)


class Indistinct(Exception):
    """Traces in which the same calls of Python, on the same path, do different things."""


def merge(traces: Sequence[Trace], looks: Looks | None = None, *, guess: bool = True) -> TraceGraph:
    """Merges traces, in order, into one graph that covers all of them.

    Args:
        traces: of one program.
        looks: what earlier merges have looked at.
        guess: whether graphs of backward passes in pieces get what is like what they have.

    Raises:
        Indistinct: if no running iteration could be told to be like one trace, or like another.
    """
    apart = any(e.piece is not None for t in traces for e in t.events)
    by_call = apart and not any(e.by_path for t in traces for e in t.events)
    general = generalize_calls(traces, looks or Looks()) if by_call else generalize(traces)
    traces = general.traces
    seen = Counter(uid for t in traces for uid in {e.uid for e in t.externals})
    parameters = {e.uid for t in traces for e in t.externals if e.parameter}
    exposed = {e.uid for t in traces for e in t.externals if e.exposed}
    captured = {uid for uid, n in seen.items() if n > 1 or uid in parameters} - exposed - _restrided(traces)
    hooks = {e.uid: e.hooks for t in traces for e in t.externals}
    # Whether a call is stopped depends on what has been saved before it.
    path_dependent = {_identity(e) for t in traces for e in t.events if is_stopped(e.result)}
    path_dependent |= {_identity(e) for t in traces for e in t.events if takes_one_value_twice(e, t)}
    repeated = _repeated(traces) if apart else frozenset()
    while True:
        builder = _Builder(captured, path_dependent, apart=apart, repeated=repeated)
        for trace in traces:
            builder.add(trace)
        conflicting = builder.conflicting_captures()
        indistinct = builder.indistinct()
        if indistinct & path_dependent:
            raise Indistinct
        builder.ambiguous |= indistinct
        if not conflicting and not builder.ambiguous:
            graph = builder.freeze(len(traces))
            graph = replace(
                graph,
                symbols=general.symbols,
                hooks=tuple(hooks[uid] for uid in graph.captured),
                paths=_paths(builder) if apart else (),
                general=isinstance(general, Generalized) and general.latest,
            )
            if apart and guess:
                graph = closed(graph)
            if isinstance(general, Generalized):
                graph = replace(graph, seen=_seen(graph, builder, general))
            else:
                graph = with_own_sizes(graph, _by_node(builder, general), _captured_metas(graph, traces))
            conflicting = {graph.captured[index] for index in varying_captures(graph)}
            if not conflicting:
                return graph
        captured -= conflicting
        path_dependent |= builder.ambiguous


def agree_on_hooks(trace: Trace, other: Trace) -> bool:
    """Whether two traces found the same hooks on tensors that both use, so that backward passes are alike."""
    hooks = {e.uid: e.hooks for e in trace.externals}
    return all(hooks.get(e.uid, e.hooks) == e.hooks for e in other.externals)


def _repeated(traces: Sequence[Trace]) -> frozenset[tuple[object, ...]]:
    """Events that some trace has several times in one place, that is in a loop."""
    counts = (Counter(_identity(e) for e in trace.events if e.piece is None) for trace in traces)
    return frozenset(identity for count in counts for identity, n in count.items() if n > 1)


def _restrided(traces: Sequence[Trace]) -> set[int]:
    """External tensors that lie in memory in several ways: a captured tensor has one."""
    layouts: dict[int, dict[object, object]] = defaultdict(dict)
    found: set[int] = set()
    for external in (e for trace in traces for e in trace.externals):
        layout = (external.meta.stride, external.meta.dtype)
        if layouts[external.uid].setdefault(external.meta.shape, layout) != layout:
            found.add(external.uid)
    return found


def _paths(builder: _Builder) -> tuple[frozenset[int], ...]:
    paths = (frozenset(renumbered_step(s, builder.new_id) for s in path) for path in builder.paths)
    return tuple(dict.fromkeys(paths))


def _seen(graph: TraceGraph, builder: _Builder, general: Generalized) -> dict[int, Seen]:
    """Nodes with symbols, and the values that these had in traces. A backward pass depends on all."""
    visits = [
        ({builder.new_id[node_of(s)] for s in path}, dict(assignment))
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


def _by_node(builder: _Builder, general: GeneralCalls) -> list[dict[int, dict[int, int]]]:
    """For each trace, by node: the values of its symbols."""
    return [
        {builder.new_id[node_of(path[event])]: of_event for event, of_event in of_trace.items()}
        for path, of_trace in zip(builder.paths, general.assignments, strict=True)
    ]


class _Kind(NamedTuple):
    """What events have to have in common to be one node.

    Where backward passes are in pieces, a node is a piece `of` one other, and has the same `own` tensors on
    all paths: parameters, and the counters of their updates. So each of the layers that a loop goes through
    has a backward pass of its own, and each parameter its updates.
    """

    identity: int  #: a number for it
    of: int | None = None
    own: tuple[int, ...] = ()


class _Identities:
    """Numbers for identities, which are long and often compared."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._all: list[tuple[object, ...]] = []

    def number(self, identity: tuple[object, ...]) -> int:
        """The number of an identity."""
        number = self._numbers.setdefault(identity, len(self._all))
        if number == len(self._all):
            self._all.append(identity)
        return number

    def of(self, number: int) -> tuple[object, ...]:
        """The identity with a number."""
        return self._all[number]


@dataclass
class _Draft:
    """A node under construction, and what events have to have in common with it."""

    node: Node
    kind: _Kind
    alternatives: list[Alternative] = field(default_factory=list)
    seen: list[list[dict[tuple[int, int], Number | Size]]] = field(
        default_factory=list
    )  # numbers on each path


class _Builder:
    def __init__(
        self,
        captured_uids: set[int],
        path_dependent: set[tuple[object, ...]],
        *,
        apart: bool,
        repeated: frozenset[tuple[object, ...]],
    ) -> None:
        self.apart = apart  # whether backward passes are in pieces
        self.captured_uids = captured_uids
        self.identities = _Identities()
        self.repeated = {self.identities.number(i) for i in repeated}  # events that are in loops, if they are
        self.path_dependent = {self.identities.number(i) for i in path_dependent}
        self.ambiguous: set[tuple[object, ...]] = set()  # events whose arguments do not say what they read
        self.captured: dict[int, int] = {}  # uid -> index
        self.drafts: list[_Draft] = []
        self.ancestors: dict[int, int] = defaultdict(int)  # the nodes before each node, as bits
        self.children: dict[int, list[int]] = defaultdict(list)
        self.by_kind: dict[_Kind, list[int]] = defaultdict(list)
        self.shared: Groups[Captured | Fed] = Groups()
        self.steps: list[int] = []  # of the trace that is being added, so far
        self.on_path: set[int] = set()  # its nodes
        self.paths: list[list[int]] = []  # the steps of each trace
        self.new_id: dict[int, int] = {}  # of each node, when they are in order

    # --- adding a trace ---

    def add(self, trace: Trace) -> None:
        latest = START
        path: list[int] = []  # node of each event so far
        self.steps = []
        self.on_path = set()
        external_refs: dict[int, Captured | Fed] = {}
        for event in trace.events:
            latest = self._match(event, latest, path, trace, external_refs)
            path.append(latest)
            self.on_path.add(latest)
        self.paths.append(self.steps)
        self._connect(latest, END)
        self._share(trace, external_refs)

    def _match(
        self, event: Event, latest: int, path: list[int], trace: Trace, refs: dict[int, Captured | Fed]
    ) -> int:
        children = [c for c in self.children[latest] if c != END]
        kind = self._kind(event, path, trace)
        for candidate in children:
            if self.drafts[candidate].kind == kind and self._merge_into(candidate, event, path, trace, refs):
                return candidate
        for candidate in self.by_kind[kind]:
            if candidate in children or candidate in self.on_path or self.ancestors[latest] >> candidate & 1:
                continue
            if not self._continues(candidate, event, path):
                continue
            if self._merge_into(candidate, event, path, trace, refs):
                self._connect(latest, candidate)
                return candidate
        return self._create(kind, event, latest, path, trace, refs)

    def _continues(self, candidate: int, event: Event, path: list[int]) -> bool:
        """Whether an event in a loop goes on with what a node elsewhere goes on with.

        In a loop over layers, events of different layers have the same place in the program. One without
        parameters belongs to the layer by which the latest of its arguments was made.
        """
        kind = self.drafts[candidate].kind
        if kind.identity not in self.repeated or kind.own:
            return True
        made = [(b, a) for a, b in enumerate(event.inputs) if isinstance(b, Produced)]
        if not made:
            return True
        latest, argument = max(made, key=lambda pair: pair[0].event)
        binding = Produced(path[latest.event], latest.output)
        return any(a.bindings[argument] == binding for a in self.drafts[candidate].alternatives)

    def _merge_into(
        self, candidate: int, event: Event, path: list[int], trace: Trace, refs: dict[int, Captured | Fed]
    ) -> bool:
        draft = self.drafts[candidate]
        node = draft.node
        if _piece(event, path) != node.piece or not same_sizes(node.numbers, event.numbers):
            return False
        own = varying(candidate, node.numbers, event.numbers)
        candidates = list(own)
        for before, earlier in _whose_numbers(event, path, trace):
            candidates += varying(before, self.drafts[before].node.numbers, earlier.numbers)
        operations = unify(node.operations, event.operations, candidates)
        if operations is None or not _compatible_outputs(node, event):
            return False
        if node.function in functions.INDEXING and unused(own, operations):
            return False
        tried = dict(refs)
        alternative = self._alternative(draft.kind, candidate, event, path, trace, tried)
        position = next(
            (
                i
                for i, known in enumerate(draft.alternatives)
                if (known.bindings, known.path) == (alternative.bindings, alternative.path)
            ),
            len(draft.alternatives),
        )
        if position < len(draft.alternatives):
            if draft.alternatives[position].sources != alternative.sources:
                if not own and draft.kind.identity not in self.path_dependent:  # else numbers tell them apart
                    self.ambiguous.add(self.identities.of(draft.kind.identity))
                return False
        else:
            draft.alternatives.append(alternative)
            draft.seen.append([])
        self.steps.append(step_of(candidate, position))
        draft.seen[position].append(_numbers_on(event, path, trace))
        refs.update(tried)
        draft.node = _with(node, operations, unify_slots(node.numbers, event.numbers), event.outputs)
        return True

    def _kind(self, event: Event, path: list[int], trace: Trace) -> _Kind:
        identity = self.identities.number(_identity(event))
        if not self.apart:
            return _Kind(identity)
        of = path[event.piece.of] if isinstance(event.piece, Passed) else None
        externals = [trace.externals[b.index] for b in event.inputs if isinstance(b, External)]
        counts = event.function is counts_of
        own = [e.uid for e in externals if (e.parameter or counts) and e.uid in self.captured_uids]
        return _Kind(identity, of, tuple(own))

    def _create(
        self,
        kind: _Kind,
        event: Event,
        latest: int,
        path: list[int],
        trace: Trace,
        refs: dict[int, Captured | Fed],
    ) -> int:
        id_ = len(self.drafts)
        node = Node(
            id=id_,
            kind=event.kind,
            function=event.function,
            name=event.name,
            key=event.key,
            location=event.location,
            numbers=tuple(NumberSlot(n) for n in event.numbers),
            implicit_metas=event.implicit_metas,
            operations=event.operations,
            outputs=event.outputs,
            grads=event.grads,
            rebinds=event.rebinds,
            result=event.result,
            backward=event.backward,
            alternatives=(),
            tape=event.tape,
            piece=_piece(event, path),
            divisible=event.passages is not None,
        )
        self.drafts.append(_Draft(node, kind))
        self.drafts[id_].alternatives.append(self._alternative(kind, id_, event, path, trace, refs))
        self.steps.append(step_of(id_, 0))
        self.drafts[id_].seen.append([_numbers_on(event, path, trace)])
        self.by_kind[kind].append(id_)
        self._connect(latest, id_)
        return id_

    def _connect(self, source: int, target: int) -> None:
        if target in self.children[source]:
            return
        self.children[source].append(target)
        if source == START or target == END:
            return
        above = self.ancestors[source] | 1 << source
        reached = [target]
        while reached:  # most often a new node, with nothing below it
            node = reached.pop()
            if node != END and above & ~self.ancestors[node]:
                self.ancestors[node] |= above
                reached += self.children[node]

    # --- references ---

    def _alternative(
        self,
        kind: _Kind,
        id_: int,
        event: Event,
        path: list[int],
        trace: Trace,
        refs: dict[int, Captured | Fed],
    ) -> Alternative:
        bindings: list[NodeBinding] = []
        for argument, binding in enumerate(event.inputs):
            if isinstance(binding, External):
                bindings.append(self._external(binding.index, id_, argument, trace, refs))
            elif isinstance(binding, Produced):
                bindings.append(Produced(path[binding.event], binding.output))
            else:
                bindings.append(None)
        passed_on = {} if event.by_path else _passed_on(event, trace)
        sources = tuple(self._source(passed_on.get(s, s), path, refs) for s in event.sources)
        by_path = event.by_path or kind.identity in self.path_dependent
        return Alternative(tuple(bindings), sources, tuple(self.steps) if by_path else None)

    def _external(
        self, index: int, id_: int, argument: int, trace: Trace, refs: dict[int, Captured | Fed]
    ) -> Captured | Fed:
        if index not in refs:
            uid = trace.externals[index].uid
            if uid in self.captured_uids:
                refs[index] = Captured(self.captured.setdefault(uid, len(self.captured)))
            else:
                refs[index] = Fed(id_, argument)
        return refs[index]

    def _source(
        self, source: Source | Produced, path: list[int], refs: dict[int, Captured | Fed]
    ) -> NodeSource:
        if isinstance(source, Produced):
            return Produced(path[source.event], source.output)
        if isinstance(source, Computed):
            return Computed(path[source.event], source.operation, source.result)
        if isinstance(source, External):
            return refs[source.index]
        return source

    def _share(self, trace: Trace, refs: dict[int, Captured | Fed]) -> None:
        by_storage: dict[int, list[Captured | Fed]] = defaultdict(list)
        for index, ref in refs.items():
            by_storage[trace.externals[index].storage].append(ref)
        for group in by_storage.values():
            if len(group) > 1:
                self.shared.join(*group)

    # --- results ---

    def indistinct(self) -> set[tuple[object, ...]]:
        """Events that come at one point in several nodes which their arguments alone do not tell apart."""
        found: set[tuple[object, ...]] = set()
        for children in self.children.values():
            alike: dict[_Kind, list[_Draft]] = defaultdict(list)
            for draft in (self.drafts[c] for c in children if c != END):
                alike[draft.kind].append(draft)
            for kind, drafts in alike.items():
                if any(_may_be_same_call(a, b) for a, b in itertools.combinations(drafts, 2)):
                    found.add(self.identities.of(kind.identity))
        return found

    def conflicting_captures(self) -> set[int]:
        """Captured tensors in argument positions that do not always hold the same tensor.

        What one round of a loop does not always take the same, the other rounds will not either.
        """
        uids = {index: uid for uid, index in self.captured.items()}
        conflicting: set[int] = set()
        for ids in self.by_kind.values():
            rounds = [self._externals_by_argument(self.drafts[i]) for i in ids]
            for columns in zip_longest(*rounds, fillvalue=frozenset()):
                if any(len(column) > 1 for column in columns):
                    externals = frozenset().union(*columns)
                    conflicting |= {uids[b.index] for b in externals if isinstance(b, Captured)}
        return conflicting

    @staticmethod
    def _externals_by_argument(draft: _Draft) -> list[frozenset[Captured | Fed]]:
        return [
            frozenset(b for b in column if isinstance(b, (Captured, Fed)))
            for column in zip(*(a.bindings for a in draft.alternatives), strict=True)
        ]

    def _pins(self, seen: list[dict[tuple[int, int], Number | Size]]) -> tuple[tuple[int, int, Number], ...]:
        """Numbers that vary in the graph, but never did where these were seen."""
        pins = []
        for (node, slot), value in seen[0].items():
            varies = self.drafts[node].node.numbers[slot].classes is not None
            if isinstance(value, Size) or not varies:
                continue
            others = [numbers[node, slot] for numbers in seen]
            if all(not isinstance(o, Size) and same_number(o, value) for o in others):
                pins.append((node, slot, value))
        return tuple(pins)

    def freeze(self, traces: int) -> TraceGraph:
        for draft in self.drafts:
            draft.alternatives = [
                replace(a, pins=self._pins(seen))
                for a, seen in zip(draft.alternatives, draft.seen, strict=True)
            ]
        sources = turned_around({n: self.children[n] for n in range(len(self.drafts))})
        order = in_order({n: sources.get(n, ()) for n in range(len(self.drafts))})
        new_id = {old: new for new, old in enumerate(order)} | {START: START, END: END}
        self.new_id = new_id
        nodes = tuple(_renumber(self.drafts[old], new_id) for old in order)
        edges = {
            new_id[source]: tuple(new_id[t] for t in targets)
            for source, targets in self.children.items()
            if source != END
        }
        shared = tuple(
            frozenset(Fed(new_id[r.node], r.argument) if isinstance(r, Fed) else r for r in group)
            for group in self.shared.all()
        )
        return TraceGraph(nodes, edges, tuple(self.captured), shared, traces)


def _passed_on(event: Event, trace: Trace) -> dict[Source, Produced]:
    """Sources that an event has from arguments which other events only passed on.

    `detach` makes no memory: in a trace, what is done to its result reads what `detach` was called on, and
    that may be something else on another path to the same `detach`.
    """
    passed: dict[Source, Produced] = {}
    direct: set[Source] = set()
    produced = [b for b in event.inputs if isinstance(b, Produced)]
    if not any(isinstance(trace.events[b.event].outputs[b.output].value, Input) for b in produced):
        return passed
    for binding in event.inputs:
        if isinstance(binding, External):
            direct.add(binding)
        elif isinstance(binding, Produced):
            before = trace.events[binding.event]
            source = trace.origin(binding)
            if isinstance(before.outputs[binding.output].value, Input):
                passed.setdefault(source, binding)
            else:
                direct.add(source)
    return {source: binding for source, binding in passed.items() if source not in direct}


def _may_be_same_call(a: _Draft, b: _Draft) -> bool:
    """Whether a call may fit two nodes of the same kind, at the same point of an iteration.

    Where values decide about shapes, these tell the nodes apart when they are known.
    """
    if is_shaped_by_data(a.node) or is_shaped_by_data(b.node):
        return False
    if at_of(a.node.piece) != at_of(b.node.piece):
        return False  # each has the sizes of its call
    ways = {(x.bindings, x.path) for x in a.alternatives}
    if ways.isdisjoint((x.bindings, x.path) for x in b.alternatives):
        return False
    slots = zip(a.node.numbers, b.node.numbers, strict=True)
    return all(
        x.classes is not None or y.classes is not None or _same_value(x.value, y.value) for x, y in slots
    )


def _same_value(a: Number | Size, b: Number | Size) -> bool:
    if isinstance(a, Size) or isinstance(b, Size):
        return a == b
    return same_number(a, b)


def _whose_numbers(event: Event, path: list[int], trace: Trace) -> Iterable[tuple[int, Event]]:
    """The events before an event whose numbers it may use, too, with their nodes."""
    if event.by_path:
        return zip(path, trace.events, strict=False)
    if isinstance(event.piece, Passed):
        return ((path[event.piece.of], trace.events[event.piece.of]),)
    return ()


def _numbers_on(event: Event, path: list[int], trace: Trace) -> dict[tuple[int, int], Number | Size]:
    return {
        (node, slot): number
        for node, earlier in _whose_numbers(event, path, trace)
        for slot, number in enumerate(earlier.numbers)
    }


def _piece(event: Event, path: list[int]) -> Piece | None:
    """What an event is a piece of, by nodes."""
    return replace(event.piece, of=path[event.piece.of]) if isinstance(event.piece, Passed) else event.piece


def _identity(event: Event | Node) -> tuple[object, ...]:
    """Terra's three criteria of equality: type, attributes, executed location."""
    return (event.function, event.key, event.location, event.kind)


def _compatible_outputs(node: Node, event: Event) -> bool:
    return (
        node.result == event.result
        and node.grads == event.grads
        and node.rebinds == event.rebinds
        and node.implicit_metas == event.implicit_metas
        and node.tape == event.tape
        and len(node.outputs) == len(event.outputs)
        and all(
            (a.meta, a.value, a.history) == (b.meta, b.value, b.history)
            for a, b in zip(node.outputs, event.outputs, strict=True)
        )
    )


def _with(
    node: Node, operations: tuple[Operation, ...], numbers: tuple[NumberSlot, ...], others: Sequence[Output]
) -> Node:
    """A node with these operations and numbers, that keeps the outputs that others have kept, too."""
    keeps = any(b.kept and not a.kept for a, b in zip(node.outputs, others, strict=True))
    if not keeps and are_those(operations, node.operations) and are_those(numbers, node.numbers):
        return node
    outputs = tuple([replace(a, kept=a.kept or b.kept) for a, b in zip(node.outputs, others, strict=True)])
    return replace(node, operations=operations, numbers=numbers, outputs=outputs)


def _renumber_ref(ref: object, new_id: dict[int, int]) -> object:
    if isinstance(ref, Produced):
        return Produced(new_id[ref.event], ref.output)
    if isinstance(ref, Computed):
        return Computed(new_id[ref.event], ref.operation, ref.result)
    if isinstance(ref, Fed):
        return Fed(new_id[ref.node], ref.argument)
    return ref


def _renumber_all(refs: Iterable[object], new_id: dict[int, int]) -> tuple[object, ...]:
    return tuple(_renumber_ref(r, new_id) for r in refs)


def _renumber(draft: _Draft, new_id: dict[int, int]) -> Node:
    alternatives = tuple(
        Alternative(
            _renumber_all(a.bindings, new_id),  # type: ignore[arg-type]  # kinds are kept
            _renumber_all(a.sources, new_id),  # type: ignore[arg-type]  # kinds are kept
            None if a.path is None else tuple(renumbered_step(s, new_id) for s in a.path),
            tuple((new_id[n], slot, value) for n, slot, value in a.pins),
            number,
        )
        for number, a in enumerate(draft.alternatives)
    )
    operations = tuple(_renumber_operation(o, new_id) for o in draft.node.operations)
    piece = draft.node.piece
    if isinstance(piece, Passed):
        piece = replace(piece, of=new_id[piece.of])
    return replace(
        draft.node, id=new_id[draft.node.id], alternatives=alternatives, operations=operations, piece=piece
    )


def _renumber_operation(operation: Operation, new_id: dict[int, int]) -> Operation:
    def renumber(argument: Any) -> Any:
        if isinstance(argument, FedNumber):
            return FedNumber(tuple(o._replace(node=new_id[o.node]) for o in argument.origins))
        return argument

    return replace(operation, args=with_leaves(operation.args, renumber))
