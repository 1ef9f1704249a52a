"""A TraceGraph while traces are added to it, as Terra's GraphGenerator does.

In:  traces, one after the other.
Out: drafts of nodes, and how they follow each other; `coexec.tracegraph.freezing` makes a graph of them.

A trace is followed from `START`. Each event is matched with a child of the latest matched node; else it is
merged back into an equal node elsewhere if that keeps the graph acyclic; else it becomes a new node.

Source: Terra, section 3.2.2 ("TraceGraph").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from coexec.tracegraph import functions
from coexec.tracegraph.graph import (
    END,
    START,
    Alternative,
    Captured,
    Fed,
    Node,
    NodeBinding,
    NodeSource,
    NumberSlot,
    step_of,
)
from coexec.tracegraph.numbers import are_those, same_sizes, unify, unify_slots, unused, varying
from coexec.tracegraph.optimizers import counts_of
from coexec.tracegraph.order import Groups
from coexec.tracegraph.sizes import Size
from coexec.tracegraph.tape import Passed, Piece
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
    Trace,
)

#: What Terra compares events by: type, attributes, executed location.
Identity = tuple[object, ...]
#: The numbers that a node might be computed from, by the node and the slot that have them.
NumbersOf = Mapping[tuple[int, int], Number | Size]


class Kind(NamedTuple):
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
        self._numbers: dict[Identity, int] = {}
        self._all: list[Identity] = []

    def number(self, identity: Identity) -> int:
        """The number of an identity."""
        number = self._numbers.setdefault(identity, len(self._all))
        if number == len(self._all):
            self._all.append(identity)
        return number

    def of(self, number: int) -> Identity:
        """The identity with a number."""
        return self._all[number]


@dataclass(frozen=True, slots=True)
class Premises:
    """What is known of all traces before they are merged.

    Attributes:
        apart: whether backward passes are in pieces.
        captured: external tensors that iterations have in common, by their uids.
        path_dependent: events of which it depends on the events before them what they read.
        repeated: events in loops, if backward passes are in pieces.
    """

    apart: bool
    captured: frozenset[int]
    path_dependent: frozenset[Identity]
    repeated: frozenset[Identity]


@dataclass
class Draft:
    """A node under construction, and what events have to have in common with it."""

    node: Node
    kind: Kind
    alternatives: list[Alternative] = field(default_factory=list)
    seen: list[list[NumbersOf]] = field(default_factory=list)  # numbers on each path


class Builder:
    """Drafts of the nodes that traces have shown, and how they follow each other."""

    def __init__(self, premises: Premises) -> None:
        self.identities = _Identities()
        self.ambiguous: set[Identity] = set()  # events whose arguments do not say what they read
        self.uids: set[int] = set()  # of the external tensors of all traces
        self.captured: dict[int, int] = {}  # uid -> index
        self.drafts: list[Draft] = []
        self.ancestors: dict[int, int] = defaultdict(int)  # the nodes before each node, as bits
        self.children: dict[int, list[int]] = defaultdict(list)
        self.by_kind: dict[Kind, list[int]] = defaultdict(list)
        self.shared: Groups[Captured | Fed] = Groups()
        self.steps: list[int] = []  # of the trace that is being added, so far
        self.on_path: set[int] = set()  # its nodes
        self.paths: list[list[int]] = []  # the steps of each trace
        self._assume(premises)

    def _assume(self, premises: Premises) -> None:
        self.premises = premises
        self.repeated = set(map(self.identities.number, premises.repeated))
        self.path_dependent = set(map(self.identities.number, premises.path_dependent))

    def goes_on_with(self, premises: Premises) -> bool:
        """Takes other premises if these are the same for all that has been added; whether they are."""
        ours = self.premises
        added = {self.identities.of(kind.identity) for kind in self.by_kind}
        fit = (
            premises.apart == ours.apart
            and premises.captured & self.uids == ours.captured
            and added.isdisjoint(premises.path_dependent ^ ours.path_dependent)
            and added.isdisjoint(premises.repeated ^ ours.repeated)
        )
        if fit:
            self._assume(premises)
        return fit

    # --- adding a trace ---

    def add(self, trace: Trace) -> None:
        """Adds a trace."""
        self.uids.update(e.uid for e in trace.externals)
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

    def _kind(self, event: Event, path: list[int], trace: Trace) -> Kind:
        identity = self.identities.number(identity_of(event))
        if not self.premises.apart:
            return Kind(identity)
        of = path[event.piece.of] if isinstance(event.piece, Passed) else None
        externals = [trace.externals[b.index] for b in event.inputs if isinstance(b, External)]
        counts = event.function is counts_of
        own = [e.uid for e in externals if (e.parameter or counts) and e.uid in self.premises.captured]
        return Kind(identity, of, tuple(own))

    def _create(
        self,
        kind: Kind,
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
        self.drafts.append(Draft(node, kind))
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
        kind: Kind,
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
            if uid in self.premises.captured:
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


def _whose_numbers(event: Event, path: list[int], trace: Trace) -> Iterable[tuple[int, Event]]:
    """The events before an event whose numbers it may use, too, with their nodes."""
    if event.by_path:
        return zip(path, trace.events, strict=False)
    if isinstance(event.piece, Passed):
        return ((path[event.piece.of], trace.events[event.piece.of]),)
    return ()


def _numbers_on(event: Event, path: list[int], trace: Trace) -> NumbersOf:
    return {
        (node, slot): number
        for node, earlier in _whose_numbers(event, path, trace)
        for slot, number in enumerate(earlier.numbers)
    }


def _piece(event: Event, path: list[int]) -> Piece | None:
    """What an event is a piece of, by nodes."""
    return replace(event.piece, of=path[event.piece.of]) if isinstance(event.piece, Passed) else event.piece


def identity_of(event: Event) -> Identity:
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
