"""A trace whose backward passes are taken to pieces.

In:  a trace.
Out: the same trace with an event for the beginning of each backward pass, one for each event that it goes
     through, and one for each leaf that gets a gradient; or the trace itself if none can be taken to pieces.

A backward pass depends on the whole path before it, so one event for all of it is another one on every path:
with n layers that are left out at random there are 2^n. Its pieces depend on what they are given, and the
TraceGraph composes them like any other events.

The order of the pieces is that of PyTorch's engine: nodes run from the latest to the first one, and a leaf
gets its gradient when all that it is used by has run (`torch/csrc/autograd/engine.cpp`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from coexec.tracegraph import functions
from coexec.tracegraph.calls import flat
from coexec.tracegraph.graph import Node, NodeSource, TraceGraph, node_of, step_of
from coexec.tracegraph.tape import (
    OWN,
    BackwardOf,
    Begun,
    Gradient,
    Passage,
    Passed,
    Piece,
    Reached,
    accumulate_grad,
)
from coexec.tracegraph.trace import (
    Binding,
    Computed,
    Constant,
    Event,
    Grad,
    Input,
    Kind,
    Local,
    Operation,
    Output,
    Produced,
    Source,
    TensorMeta,
    Trace,
    Value,
    takes_one_value_twice,
    with_leaves,
)


def in_pieces(trace: Trace) -> Trace:
    """Takes the backward passes of a trace to pieces, where that can be done."""
    if all(e.passages is None for e in trace.events):
        return trace
    apart = _Apart(trace)
    whole = False  # what a pass frees that is not in pieces is not known, so that no other one is behind it
    for number, event in enumerate(trace.events):
        made = None if event.passages is None or whole else _Pass(apart, number).events()
        if made is None:
            whole = whole or event.backward
            apart.keep(number)
        else:
            apart.events += made
    return replace(trace, events=tuple(apart.events))


def forms_of_backward(graph: TraceGraph, *, with_sizes: bool) -> int:
    """On how many ways the same backward pass is in a graph, where it is on the most.

    Other sizes on the same way are no other one. Their values come from other nodes, though: with sizes, such
    values make it another way.
    """
    forms: dict[Hashable, set[Hashable]] = defaultdict(set)
    for node in graph.nodes:
        if node.by_path and node.divisible:
            for alternative in node.alternatives:
                way = tuple([_place_of(graph, step, with_sizes) for step in alternative.path or ()])
                forms[node.function, node.location].add(way)
    return max(map(len, forms.values()), default=0)


def _place_of(graph: TraceGraph, step: int, with_sizes: bool) -> Hashable:
    """Where a call stands, and what made its arguments, or where that stands."""
    node = graph.nodes[node_of(step)]
    if with_sizes:
        return node.location, step - node.id
    taken = next((a for a in node.alternatives if step_of(node.id, a.number) == step), None)
    made = [b for b in (() if taken is None else taken.bindings) if isinstance(b, Produced)]
    return node.location, tuple([(graph.nodes[b.event].location, b.output) for b in made])


#: Arguments that a kernel does not read where it computes gradients for training.
_UNREAD = {
    "aten::native_batch_norm_backward": (3, 4),  # the running statistics
    "aten::cudnn_batch_norm_backward": (3, 4),
    "aten::miopen_batch_norm_backward": (3, 4),
    "aten::batch_norm_backward": (3, 4),
}


def saved_sources(graph: TraceGraph, node: Node) -> frozenset[int]:
    """The sources of a piece that autograd has saved, and that its kernels read."""
    read: set[int] = set()
    for operation in node.operations:
        unread = _UNREAD.get(operation.target._schema.name, ()) if True in operation.args else ()
        for position, argument in enumerate(operation.args):
            if position not in unread:
                read |= {v.index for v in flat(argument) if isinstance(v, Input)}
    return frozenset(i for i in read if any(_is_saved(graph, a.sources[i]) for a in node.alternatives))


def _is_saved(graph: TraceGraph, source: NodeSource) -> bool:
    """Whether a piece has something from autograd, and not from another piece."""
    return not isinstance(source, (Computed, Produced)) or graph.nodes[source.event].piece is None


@dataclass
class _Apart:
    """A trace that is taken to pieces: where the events of the original are."""

    trace: Trace
    events: list[Event] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # of events that stay as they are
    outputs: dict[Produced, Produced] = field(default_factory=dict)  # of backward passes
    operations: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # of backward passes

    def keep(self, number: int) -> None:
        """Takes an event over as it is."""
        event = self.trace.events[number]
        self.numbers[number] = len(self.events)
        inputs = tuple(map(self.binding, event.inputs))
        sources = tuple(map(self.source, event.sources))
        self.events.append(replace(event, inputs=inputs, sources=sources, passages=None))

    def binding(self, binding: Binding) -> Binding:
        """What names the same tensor here."""
        if not isinstance(binding, Produced):
            return binding
        if binding in self.outputs:
            return self.outputs[binding]
        return Produced(self.numbers[binding.event], binding.output)

    def source(self, source: Source) -> Source:
        """What names the same value here."""
        assert not isinstance(source, Produced)  # traces are taken to pieces once
        if not isinstance(source, Computed):
            return source
        event, operation = self.operations.get((source.event, source.operation), (None, source.operation))
        return Computed(self.numbers[source.event] if event is None else event, operation, source.result)


#: Where a gradient goes: to an event and its entry, or to a leaf.
Target = Hashable


class _Pass:
    """One backward pass that is taken to pieces."""

    def __init__(self, apart: _Apart, number: int) -> None:
        self._apart = apart
        self._trace = apart.trace
        self._event = apart.trace.events[number]
        self._number = number
        self._made: list[Event] = []
        self._gradients: dict[Target, tuple[Produced, Gradient]] = {}
        self._memory: dict[Target, Hashable] = {}  # what memory a gradient is on; None if anybody may have it
        self._operations: dict[int, tuple[int, int]] = {}
        self._outputs: dict[Produced, Produced] = {}

    def events(self) -> list[Event] | None:
        """The events that the pass is made of; None if a leaf keeps what others may still write to."""
        assert self._event.passages is not None
        begin, *others = self._event.passages
        self._begin(begin, others[0])
        for passage in others:
            event = passage.event
            if not (self._reach(passage) if event is None else self._pass(passage, event)):
                return None
        self._apart.operations |= {(self._number, o): place for o, place in self._operations.items()}
        self._apart.outputs |= self._outputs
        return self._made

    def _begin(self, begin: Passage, first: Passage) -> None:
        """The beginning: the gradient of the tensor that the pass is called on."""
        event = self._event
        key: Any = event.key
        positional, named = key[0]
        retains = dict(named).get("retain_graph") or positional[2:3] == (True,)
        piece = Begun(frees=not retains)
        ((entry, gradient),) = first.takes
        assert first.event is not None
        explicit = len(key[2])
        inputs = tuple(map(self._apart.binding, event.inputs[:explicit]))
        made = self._new(begin.operations, [gradient.value], {}, {})
        output = Output(gradient.meta, made.values[0], None, kept=False, uid=-1)
        number = self._add(
            replace(
                event,
                inputs=inputs,
                implicit_metas=(),
                sources=tuple(made.sources),
                operations=made.operations,
                outputs=(output,),
                grads=(),
                tape=None,
                passages=None,
                piece=piece,
            )
        )
        self._gradients[first.event, entry] = (Produced(number, 0), gradient)
        self._memory[first.event, entry] = None  # Python holds it while the pass runs

    def _pass(self, passage: Passage, of: int) -> bool:
        """The nodes of one event."""
        forward = self._trace.events[of]
        key: Any = self._event.key
        forward_key: Any = forward.key
        targets = [self._target(of, argument) for argument, _, _ in passage.gives]
        added = [t for t, (_, _, before) in zip(targets, passage.gives, strict=True) if before is not None]
        if not self._gradients.keys() >= {*((of, entry) for entry, _ in passage.takes), *added}:
            return False  # a tensor whose `data` was assigned goes on as another value
        taken = [self._gradients.pop((of, entry)) for entry, _ in passage.takes]
        memory: list[Hashable] = [self._memory.pop((of, entry)) for entry, _ in passage.takes]
        taken += [self._gradients[t] for t in added]
        memory += [self._memory[t] for t in added]
        named = {self._source_of(g.value): p for p, g in taken[: len(passage.takes)]}
        if len(named) < len(passage.takes) or takes_one_value_twice(forward, self._trace):
            return False  # on another path these are different values
        of_target = {t: self._gradients[t][0] for t in added}
        adds = {operation: of_target[self._target(of, argument)] for operation, argument in passage.adds}
        values = [after.value for _, after, _ in passage.gives]
        made = self._new(passage.operations, values, named, adds)
        places: list[Source] = [p for p, _ in taken]
        on = tuple(self._on(v, made, places) for v in made.values)
        arguments = list(map(self._apart.binding, forward.inputs))
        values_of = [self._apart.source(self._trace.origin(b)) for b in forward.inputs if b is not None]
        if not all(s in places or s in values_of or self._is_of(s, of) for s in made.sources):
            return False  # it reads what its call did not have
        saved = tuple(sorted({values_of.index(s) for s in made.sources if s in values_of}))
        piece = Passed(
            of=self._apart.numbers[of],
            entries=tuple(entry for entry, _ in passage.takes),
            gives=tuple(argument for argument, _, _ in passage.gives),
            adds=tuple(before is not None for _, _, before in passage.gives),
            saved=saved,
            memory=on,
        )
        metas = (*(g.meta for _, g in taken), *(forward_key[2][i] for i in saved))
        number = self._add(
            _event(
                self._event,
                BackwardOf(forward.function),
                f"backward of {forward.name}",
                (("piece", piece.entries, piece.gives, piece.adds), key[1], metas),
                inputs=(*(p for p, _ in taken), *(arguments[i] for i in saved)),
                made=made,
                outputs=tuple(
                    Output(after.meta, value, None, kept=False, uid=-1)
                    for (_, after, _), value in zip(passage.gives, made.values, strict=True)
                ),
                piece=piece,
            )
        )
        for output, ((_, after, _), target, place) in enumerate(zip(passage.gives, targets, on, strict=True)):
            self._gradients[target] = (Produced(number, output), after)
            self._memory[target] = memory_of(place, memory, number)
        return True

    def _is_of(self, source: Source, event: int) -> bool:
        """Whether a value is one that an event has made, or was made with."""
        made = isinstance(source, Computed) and source.event == self._apart.numbers[event]
        return made or isinstance(source, Constant)

    def _reach(self, passage: Passage) -> bool:
        """A leaf that gets its gradient."""
        assert passage.leaf is not None
        event = self._event
        leaf = event.inputs[passage.leaf]
        assert leaf is not None
        if leaf not in self._gradients:
            return False
        produced, gradient = self._gradients.pop(leaf)
        memory = self._memory.pop(leaf)
        key: Any = event.key
        bindings = event.inputs[passage.leaf : passage.leaf + 2]
        given = [g for g in event.grads if g.leaf == passage.leaf]
        values = [event.outputs[g.output].value for g in given]
        made = self._new(passage.operations, values, {self._source_of(gradient.value): produced}, {})
        steals = [self._on(v, made, [produced]) for v in made.values] == [0]
        known = [self._apart.source(self._trace.origin(b)) for b in bindings if b is not None]
        if steals and is_shared(memory, self._memory.values()):
            return False
        if not all(s == produced or s in known for s in made.sources):
            return False
        explicit = len(key[2])
        implicit = event.implicit_metas[passage.leaf - explicit : passage.leaf - explicit + 2]
        piece = Reached(steals)
        number = self._add(
            _event(
                event,
                accumulate_grad,
                functions.name_of(accumulate_grad),
                (("leaf", steals), key[1], (gradient.meta,)),
                inputs=(produced, *map(self._apart.binding, bindings)),
                made=made,
                outputs=tuple(
                    replace(event.outputs[g.output], value=v) for g, v in zip(given, made.values, strict=True)
                ),
                piece=piece,
                implicit_metas=implicit,
                grads=tuple(Grad(1, i) for i in range(len(given))),
            )
        )
        for position, grad in enumerate(given):
            self._outputs[Produced(self._number, grad.output)] = Produced(number, position)
        return True

    def _target(self, event: int, argument: int) -> Target:
        """Where the gradient of an argument goes."""
        binding = self._trace.events[event].inputs[argument]
        assert binding is not None
        if isinstance(binding, Produced):
            tape = self._trace.events[binding.event].tape
            entry = None if tape is None else tape.entries[binding.output]
            if entry is not None:
                return binding.event, entry
        return binding

    def _add(self, event: Event) -> int:
        self._made.append(event)
        return len(self._apart.events) + len(self._made) - 1

    def _new(
        self,
        numbers: tuple[int, ...],
        values: list[Value],
        gradients: dict[Source, Produced],
        adds: dict[int, Produced],
    ) -> _Made:
        """Operations of the pass as those of an event of their own, and what `values` are there.

        Args:
            numbers: the operations.
            values: what is wanted besides.
            gradients: by what they are in the end, the gradients that came in.
            adds: by operation, the gradients that others are added to.
        """
        event = len(self._apart.events) + len(self._made)
        places = {number: place for place, number in enumerate(numbers)}
        sources: list[Source] = []

        def named(source: Source) -> Input:
            if source not in sources:
                sources.append(source)
            return Input(sources.index(source))

        def renamed(argument: Any) -> Any:
            if isinstance(argument, Local) and argument.operation in places:
                return Local(places[argument.operation], argument.result)
            if isinstance(argument, (Local, Input)):
                source = self._source_of(argument)
                return named(gradients.get(source, source))
            return argument

        operations = []
        for number in numbers:
            operation = self._event.operations[number]
            if number in adds:  # the first argument is a gradient that another piece made
                args = (named(adds[number]), *with_leaves(operation.args[1:], renamed))
                operations.append(replace(operation, args=args))
            else:
                operations.append(_mapped(operation, renamed))
        made = _Made(tuple(operations), sources, [renamed(v) for v in values])
        self._operations |= {number: (event, place) for place, number in enumerate(numbers)}
        return made

    def _source_of(self, value: Value) -> Source:
        """What an event after this one would call a value of the pass."""
        if isinstance(value, Input):
            return self._apart.source(self._event.sources[value.index])
        event, place = self._operations[value.operation]
        return Computed(event, place, value.result)

    def _on(self, value: Value, made: _Made, places: list[Source]) -> int | None:
        """The position of the argument whose memory a value is on."""
        while isinstance(value, Local):
            result = made.operations[value.operation].results[value.result]
            assert result is not None
            if result.alias is None:
                return OWN - 64 * value.operation - value.result
            value = result.alias
        source = made.sources[value.index]
        return places.index(source) if source in places else None


@dataclass
class _Made:
    operations: tuple[Operation, ...]
    sources: list[Source]
    values: list[Value]


def memory_of(place: int | None, memory: list[Hashable], event: Hashable) -> Hashable:
    """The memory that an output of a piece is on.

    Args:
        place: what `Passed.memory` says of it.
        memory: that of the arguments.
        event: the piece.

    Returns:
        What is equal for the same memory; None for memory that anybody may have.
    """
    if place is None:
        return None
    return (event, place) if place <= OWN else memory[place]


def is_shared(memory: Hashable, others: Any) -> bool:
    """Whether memory is also that of another gradient on its way, so that a leaf may not keep it."""
    return memory is None or any(memory == other for other in others)


def _mapped(operation: Operation, renamed: Any) -> Operation:
    results = tuple(
        [r if r is None or r.alias is None else replace(r, alias=renamed(r.alias)) for r in operation.results]
    )
    return replace(
        operation,
        args=with_leaves(operation.args, renamed),
        results=results,
        writes=tuple([renamed(w) for w in operation.writes]),
    )


def _event(
    backward: Event,
    function: Any,
    name: str,
    key: Hashable,
    *,
    inputs: tuple[Binding, ...],
    made: _Made,
    outputs: tuple[Output, ...],
    piece: Piece,
    implicit_metas: tuple[TensorMeta | None, ...] = (),
    grads: tuple[Grad, ...] = (),
) -> Event:
    return Event(
        kind=Kind.COMPUTE,
        function=function,
        name=name,
        key=key,
        location=backward.location,
        numbers=(),
        inputs=inputs,
        implicit_metas=implicit_metas,
        sources=tuple(made.sources),
        operations=made.operations,
        outputs=outputs,
        grads=grads,
        rebinds=(),
        result=None,
        backward=True,
        piece=piece,
    )
