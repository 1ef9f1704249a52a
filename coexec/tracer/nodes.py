"""Autograd's graph as it is recorded: which nodes each event makes, and what a backward pass does with them.

In:  the events of an iteration, with the tensors that they take and return; the backward passes of the real
     engine, watched by hooks on its nodes.
Out: a `Tape` for each event, and the `Passage`s of each backward pass; none where a node is found that no
     event accounts for, or the engine does something else than `coexec.tracegraph.tape.route` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from coexec.tracegraph import calls
from coexec.tracegraph.tape import Gradient, Passage, Tape, Unknown, route
from coexec.tracegraph.trace import (
    Binding,
    External,
    Local,
    Operation,
    Produced,
    Source,
    TensorMeta,
    Value,
)
from coexec.tracer.memory import Geometry, geometry_of

Edge = tuple[int, int]  # the sequence number of a node, and which of its results' gradients goes in there
LEAF = "torch::autograd::AccumulateGrad"


def node_of(tensor: torch.Tensor, unusable: Any = None) -> Any:
    """The node that made a tensor; None for one without history, `unusable` where to use it is an error."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # one of several views at once, whose base has been written
        return unusable


def nodes_behind(tensors: Iterable[torch.Tensor], but: Set[Any] = frozenset()) -> Iterator[Any]:
    """The nodes that tensors depend on, each once, without those of `but` and what is behind them."""
    stack = [node_of(t) for t in tensors]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or node in but:
            continue
        seen.add(node)
        yield node
        stack += [n for n, _ in node.next_functions]


def edge_of(tensor: torch.Tensor) -> Edge | None:
    """Where the gradient of a tensor goes in; None for a tensor without history."""
    node = node_of(tensor)
    return None if node is None else (node._sequence_nr(), tensor.output_nr)


@dataclass
class _Event:
    """What is known of an event that may have a tape."""

    tape: Tape
    bindings: Sequence[Binding]
    entries: dict[Edge, int]
    exits: dict[Edge | int, int]  # an edge, or the `id` of a leaf -> the argument
    values: dict[Geometry, Source]  # its arguments, and what its operations made


@dataclass
class _Run:
    """One run of a node: which operations were its own, and the gradients that came in and out."""

    key: int | torch.Tensor  # a sequence number, or a leaf
    next: tuple[tuple[Any, int], ...]
    first: int
    takes: list[_Seen | None]
    last: int = -1
    gives: list[_Seen | None] = field(default_factory=list)


@dataclass(frozen=True)
class _Seen:
    value: Value
    meta: TensorMeta
    geometry: Geometry


class Names(Protocol):
    """What a watched backward pass asks of the recorder."""

    def operations_so_far(self) -> int:
        """How many operations the event has by now."""

    def name(self, tensor: torch.Tensor) -> Value:
        """The event's name for a tensor."""


@dataclass
class Pass:
    """A backward pass of the real engine while it runs.

    Attributes:
        gradients: what has been given to the pass, or by its nodes.
        runs: of nodes and leaves, so far.
        strange: whether an operation has read what the piece that it belongs to cannot know.
        results: for each operation the geometry of what it made.
    """

    gradients: dict[Geometry, Value]
    runs: list[_Run] = field(default_factory=list)
    strange: bool = False
    results: dict[int, Geometry] = field(default_factory=dict)
    _event: int | None = None
    _leaf: bool = False
    _adding: bool = True  # between two nodes, and before the first one
    _here: dict[Geometry, Source] = field(default_factory=dict)
    _own: dict[Geometry, Value] = field(default_factory=dict)
    _of_leaf: dict[Geometry, Value] = field(default_factory=dict)

    @property
    def is_at_leaf(self) -> bool:
        """Whether it is a leaf that runs."""
        return self._leaf

    def enter(self, event: int, values: dict[Geometry, Source]) -> None:
        """A node of this event runs next, whose arguments and results are `values`."""
        self._leaf = self._adding = False
        if event != self._event:
            self._event, self._here, self._own = event, values, {}

    def enter_leaf(self) -> None:
        """A leaf gets its gradient next."""
        self._leaf, self._adding, self._of_leaf = True, False, {}

    def leave(self, gives: Sequence[_Seen | None]) -> None:
        """A node has run; what it gave is added to other gradients next."""
        self._adding = True
        self.gradients |= {s.geometry: s.value for s in gives if s is not None}

    def find(self, geometry: Geometry) -> Value | Source | None:
        """What the piece that is running knows by this memory and geometry."""
        own = self._of_leaf if self._leaf else self._own
        if geometry in own:
            return own[geometry]
        here = None if self._leaf else self._here.get(geometry)
        gradient = self.gradients.get(geometry)
        if here is not None and gradient is not None:
            self.strange = True  # on another path the gradient is something else
        return here or gradient

    def see(self, gradients: Sequence[torch.Tensor | None], names: Names) -> list[_Seen | None]:
        """Gradients that go into a node or come out of it."""
        if self.strange:
            return []
        try:
            return [None if g is None else _seen(g, names) for g in gradients]
        except Exception:  # the engine must not see it; whatever it is, the pass stays whole
            self.strange = True
            return []

    def has(self, geometry: Geometry) -> bool:
        """Whether this is a value of the event that the piece which is running belongs to, or its own."""
        return geometry in self._of_leaf if self._leaf else geometry in self._own or geometry in self._here

    def made(self, geometry: Geometry, value: Local) -> None:
        """Notes what an operation has made."""
        self.results.setdefault(value.operation, geometry)
        (self._of_leaf if self._leaf else self._own)[geometry] = value
        if self._adding:
            self.gradients[geometry] = value


class Nodes:
    """The autograd nodes of one iteration."""

    def __init__(self) -> None:
        self._events: dict[int, _Event] = {}
        self._event_of: dict[int, int] = {}  # by sequence number
        self._edges: dict[Produced, Edge] = {}  # of each output, as its event left it

    # --- events ---

    def tape(
        self,
        event: int,
        first: int,
        arguments: Sequence[tuple[torch.Tensor, Binding, Edge | None, Geometry, Source]],
        outputs: Sequence[torch.Tensor],
        own: dict[Geometry, Any],
    ) -> Tape | None:
        """The tape of an event that has just run.

        Args:
            event: its number.
            first: the sequence number of the next node, before the event ran.
            arguments: its tensors, with their edges and geometry as they were before.
            outputs: the tensors that it gave to Python.
            own: what its operations made, by geometry.
        """
        edges = [edge_of(t) for t in outputs]
        self._edges |= {Produced(event, i): e for i, e in enumerate(edges) if e is not None}
        if all(e is None for e in edges):
            return None
        exits: dict[Edge | int, int] = {}
        for position, (tensor, binding, edge, _, _) in enumerate(arguments):
            if isinstance(binding, Produced) and edge != self._edges.get(binding):
                return None  # something else than its event has changed its history
            if edge is not None:
                exits.setdefault(edge, position)
            elif tensor.requires_grad:
                exits.setdefault(id(tensor), position)
        entries: dict[Edge, int] = {}
        leads: list[frozenset[int]] = []
        walk = _Walk(first, exits)
        for tensor, edge in zip(outputs, edges, strict=True):
            if edge is None or edge in entries:
                continue
            found = walk.leads(tensor.grad_fn) if edge[0] >= first else None
            if found is None:
                return None
            entries[edge] = len(leads)
            leads.append(found)
        tape = Tape(tuple([None if e is None else entries[e] for e in edges]), tuple(leads))
        values = {geometry: source for _, _, _, geometry, source in arguments}
        for geometry, source in own.items():
            values.setdefault(geometry, source)
        self._events[event] = _Event(tape, [b for _, b, _, _, _ in arguments], entries, exits, values)
        self._event_of |= dict.fromkeys(walk.seen, event)
        return tape

    # --- backward passes ---

    @contextmanager
    def watched(self, given: Sequence[torch.Tensor], names: Names) -> Iterator[Pass | None]:
        """Watches the backward pass that runs meanwhile; None if its graph is not that of events.

        Args:
            given: the tensors that it is called with, the one that it begins at first.
            names: the recorder.
        """
        nodes = self._reached(given[0])
        if nodes is None:
            yield None
            return
        running = Pass({geometry_of(t): names.name(t) for t in given})
        handles = []
        try:
            for node in nodes:
                handles.append(node.register_prehook(self._before(node, running, names)))
                if node.name() != LEAF:  # what is behind a leaf changes how the leaf takes its gradient
                    handles.append(node.register_hook(self._after(running, names)))
            yield running
        finally:
            for handle in handles:
                handle.remove()

    def _reached(self, root: torch.Tensor) -> list[Any] | None:
        if root.grad_fn is None:
            return None
        found: dict[Any, None] = {}
        waiting: list[Any] = [root.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found[node] = None
            if node.name() != LEAF and node._sequence_nr() not in self._event_of:
                return None
            waiting += [n for n, _ in node.next_functions if n is not None]
        return list(found)

    def _before(self, node: Any, running: Pass, names: Names) -> Any:
        leaf = node.name() == LEAF
        key = node.variable if leaf else node._sequence_nr()
        following = () if leaf else node.next_functions

        def before(gradients: Sequence[torch.Tensor | None]) -> None:
            if leaf:
                running.enter_leaf()
            else:
                event = self._event_of[key]
                running.enter(event, self._events[event].values)
            taken = running.see(gradients, names)
            running.runs.append(_Run(key, following, names.operations_so_far(), taken))

        return before

    def _after(self, running: Pass, names: Names) -> Any:
        def after(outputs: Sequence[torch.Tensor | None], inputs: object) -> None:
            run = running.runs[-1]
            run.last = names.operations_so_far()
            run.gives = running.see(outputs, names)
            running.leave(run.gives)

        return after

    def passages(
        self, running: Pass, root: Edge | None, leaves: dict[int, int], operations: Sequence[Operation]
    ) -> tuple[Passage, ...] | None:
        """What a backward pass did, event by event; None if that is not what it should have done.

        Args:
            running: the pass, which has ended.
            root: where it began.
            leaves: by `id` of a leaf, its position among the inputs of the event.
            operations: those of the event.
        """
        if running.strange or not running.runs:
            return None
        try:
            made = _Passages(self._events, self._event_of, running, leaves, operations).run(root)
        except (_Otherwise, Unknown):
            return None
        return made


class _Otherwise(Exception):
    """The engine did something that no passage describes."""


class _Walk:
    """Walks along the nodes of one event, of which there may be thousands."""

    def __init__(self, first: int, exits: dict[Edge | int, int]) -> None:
        self._first = first
        self._exits = exits
        self.seen: dict[int, frozenset[int] | None] = {}  # of each node, the arguments that it leads to

    def leads(self, node: Any) -> frozenset[int] | None:
        """The arguments that a node leads to; None if it leads anywhere else, too."""
        inside: dict[int, Any] = {}
        waiting = [node]
        while waiting:
            node_inside = waiting.pop()
            number = node_inside._sequence_nr()
            if number not in inside and number not in self.seen:
                inside[number] = node_inside
                waiting += [n for n, _ in node_inside.next_functions if self._is_inside(n)]
        for number in sorted(inside):  # a node leads to earlier ones
            found = [self._of(n, position) for n, position in inside[number].next_functions if n is not None]
            known = [f for f in found if f is not None]
            self.seen[number] = frozenset().union(*known) if len(known) == len(found) else None
        return self.seen[node._sequence_nr()]

    def _is_inside(self, node: Any) -> bool:
        return node is not None and node.name() != LEAF and node._sequence_nr() >= self._first

    def _of(self, node: Any, position: int) -> frozenset[int] | None:
        if self._is_inside(node):
            return self.seen[node._sequence_nr()]
        edge = id(node.variable) if node.name() == LEAF else (node._sequence_nr(), position)
        return frozenset({self._exits[edge]}) if edge in self._exits else None


@dataclass
class _Passages:
    events: dict[int, _Event]
    event_of: dict[int, int]
    running: Pass
    leaves: dict[int, int]
    operations: Sequence[Operation]
    gradients: dict[Edge | int, _Seen] = field(default_factory=dict)
    first_adds: dict[Edge | int, int] = field(default_factory=dict)  # operations of the running passage

    def run(self, root: Edge | None) -> tuple[Passage, ...]:
        runs = self.running.runs
        if root is None or runs[0].key != root[0] or runs[0].takes[root[1]] is None:
            raise _Otherwise
        first = runs[0].takes[root[1]]
        assert first is not None
        self.gradients[root] = first
        ends = [r.first for r in runs[1:]] + [len(self.operations)]
        found: list[Passage] = [Passage(None, None, tuple(range(runs[0].first)), ())]
        position = 0
        order: list[int] = []
        last: dict[int, int] = {}
        while position < len(runs):
            key = runs[position].key
            if isinstance(key, torch.Tensor):
                raise _Otherwise  # the first one of a passage is no leaf
            event = self.event_of[key]
            inside: list[tuple[_Run, int]] = []
            reached: list[tuple[_Run, int]] = []
            while position < len(runs):
                run = runs[position]
                if isinstance(run.key, torch.Tensor):
                    reached.append((run, ends[position]))
                elif self.event_of[run.key] == event:
                    inside.append((run, ends[position]))
                else:
                    break
                position += 1
            order.append(event)
            found.append(self._passage(event, inside))
            leaves = []
            for run, end in reached:
                assert isinstance(run.key, torch.Tensor)
                last[id(run.key)] = event
                leaves.append((self.events[event].exits.get(id(run.key), -1), self._leaf(run, end)))
            found += [p for _, p in sorted(leaves, key=lambda pair: pair[0]) if p is not None]
        self._check_route(order, last, root)
        return tuple(found)

    def _check_route(self, order: list[int], last: dict[int, int], root: Edge) -> None:
        ids: dict[External | Produced, int] = {}

        def target(event: int, argument: int) -> Any:
            known = self.events[event]
            edge = next(e for e, a in known.exits.items() if a == argument)
            if isinstance(edge, tuple):
                to = self.event_of[edge[0]]
                return to, self.events[to].entries[edge]
            binding = known.bindings[argument]
            assert binding is not None
            ids[binding] = edge
            return binding

        length = max(order) + 1
        tapes = [self.events[i].tape if i in self.events else None for i in range(length)]
        begins = self.event_of[root[0]]
        expected = route(tapes, target, (begins, self.events[begins].entries[root]))
        if expected.events != tuple(order) or {ids[b]: e for b, e in expected.last.items()} != last:  # type: ignore[index]
            raise _Otherwise

    def _passage(self, event: int, inside: list[tuple[_Run, int]]) -> Passage:
        known = self.events[event]
        takes = tuple(
            (entry, Gradient(g.value, g.meta))
            for edge, entry in sorted(known.entries.items(), key=lambda item: item[1])
            if (g := self.gradients.get(edge)) is not None
        )
        before: dict[Edge | int, _Seen | None] = {}
        operations: list[int] = []
        for run, end in inside:
            for position, take in enumerate(run.takes):
                had = self.gradients.pop((run.key, position), None)  # type: ignore[arg-type]  # it is no leaf
                if (had is None) != (take is None) or (had and take and had.geometry != take.geometry):
                    raise _Otherwise
            operations += range(run.first, end)
            self._add(run, end, event, before)
        gives, adds = [], []
        for edge, had in before.items():
            argument = known.exits.get(edge)
            if argument is None:
                raise _Otherwise
            now = self.gradients[edge]
            was = None if had is None else Gradient(had.value, had.meta)
            gives.append((argument, Gradient(now.value, now.meta), was))
            if edge in self.first_adds:
                adds.append((self.first_adds.pop(edge), argument))
        gives.sort(key=lambda give: give[0])
        return Passage(event, None, tuple(operations), takes, tuple(gives), tuple(adds))

    def _add(self, run: _Run, end: int, event: int, before: dict[Edge | int, _Seen | None]) -> None:
        """Follows the gradients that a node has given to where they are added up."""
        adds = iter(range(run.last, end))
        for (node, position), give in zip(run.next, run.gives, strict=True):
            if node is None or give is None:
                continue
            edge: Edge | int
            edge = id(node.variable) if node.name() == LEAF else (node._sequence_nr(), position)
            had = self.gradients.get(edge)
            if isinstance(edge, int) or self.event_of[edge[0]] != event:
                before.setdefault(edge, had)
            number = None if had is None else next(adds, None)
            self.gradients[edge] = give if had is None else self._sum(had, give, number)
            if had is not None and had is before.get(edge) and number is not None:
                self.first_adds[edge] = number
        if next(adds, None) is not None:
            raise _Otherwise

    def _sum(self, had: _Seen, give: _Seen, number: int | None) -> _Seen:
        if number is None:
            raise _Otherwise
        operation = self.operations[number]
        expected = operation.target is torch.ops.aten.add.Tensor
        result = operation.results[0] if expected else None
        if result is None or tuple(operation.args) != (had.value, give.value, 1):
            raise _Otherwise
        return _Seen(Local(number, 0), result.meta, self.running.results[number])

    def _leaf(self, run: _Run, end: int) -> Passage | None:
        key = id(run.key)
        had, take = self.gradients.pop(key, None), run.takes[0]
        if had is None and take is None:
            return None
        if had is None or take is None or had.geometry != take.geometry or key not in self.leaves:
            raise _Otherwise
        taken = ((0, Gradient(had.value, had.meta)),)
        return Passage(None, self.leaves[key], tuple(range(run.first, end)), taken)


def _seen(tensor: torch.Tensor, names: Names) -> _Seen:
    with torch._C.DisableTorchFunction():
        return _Seen(names.name(tensor), calls.meta_of(tensor), geometry_of(tensor))
