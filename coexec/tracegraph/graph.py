"""TraceGraph: all traces of a program merged into one directed acyclic graph.

In:  traces, merged by `coexec.tracegraph.merge`.
Out: what the PythonRunner validates a running iteration against, and what
     `coexec.tracegraph.symbolic` turns into the program that the GraphRunner executes.

A node is one event. An edge says that one event came right after the other in some trace. Every
path from `START` to `END` is an iteration that the graph can execute, also when that path was never
seen as a whole.

Source: Terra's TraceGraph (dissertation, section 3.2.2 and definition 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from coexec.tracegraph.calls import meta_of
from coexec.tracegraph.sizes import Size, Symbol, symbols_in
from coexec.tracegraph.tape import Piece, Tape
from coexec.tracegraph.trace import (
    Computed,
    Constant,
    Dimension,
    Grad,
    Hooks,
    Kind,
    Local,
    Number,
    Operation,
    Output,
    Produced,
    TensorMeta,
)

START = -1
END = -2


@dataclass(frozen=True, slots=True)
class Captured:
    """External tensor `index` that is the same object in every trace (a parameter, a buffer)."""

    index: int


@dataclass(frozen=True, slots=True)
class Fed:
    """The external tensor that the iteration first used as tensor argument `argument` of `node`."""

    node: int
    argument: int


NodeBinding = Produced | Captured | Fed | None
#: `Produced`: what another node passed on to this one, which is not the same on all paths.
NodeSource = Computed | Produced | Captured | Fed | Constant


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """A Python number among the arguments of an event.

    `classes` is None while every trace had the same number, or the same expression in sizes; otherwise the
    number is fed, and may be any number of these classes (see `calls.number_class`).
    """

    value: Number | Size
    classes: frozenset[Hashable] | None = None


class NumberOrigin(NamedTuple):
    """Number `slot` of `node`, through `transform` (see `numbers.TRANSFORMS`)."""

    node: int
    slot: int
    transform: str


@dataclass(frozen=True, slots=True)
class FedNumber:
    """In an operation's arguments: a number that varies, and where it comes from.

    `origins` are all numbers of this node and, for a backward pass, of nodes before it that explain
    it in every trace. They have to agree in an iteration; the first one is fed.
    """

    origins: tuple[NumberOrigin, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way in which the arguments of a node bind, and what its operations then read.

    `path` holds the steps before it when the node depends on all of them: a backward pass, or a call
    whose arguments alone do not say what it reads. `pins`
    are numbers of that path that vary elsewhere, but had one value in every trace of this
    alternative: (node, slot, value). `number` tells the alternatives of a node apart in steps. An
    alternative is only taken `after` a step, if it has one: its arguments are those of an earlier node.
    """

    bindings: tuple[NodeBinding, ...]
    sources: tuple[NodeSource, ...]
    path: tuple[int, ...] | None
    pins: tuple[tuple[int, int, Number], ...] = ()
    number: int = 0
    after: int | None = None


_NODES = 1 << 32


def step_of(node: int, alternative: int) -> int:
    """A step of a path: a node in one of its alternatives. What `Python` chose may show in nothing else."""
    return alternative * _NODES + node


def node_of(step: int) -> int:
    """The node of a step."""
    return step % _NODES


def renumbered_step(step: int, new: Mapping[int, int]) -> int:
    """A step of a graph whose nodes have other numbers."""
    return step - node_of(step) + new[node_of(step)]


@dataclass(frozen=True, slots=True)
class Node:
    """An event that traces have in common."""

    id: int
    kind: Kind
    function: Callable[..., Any]
    name: str
    key: Hashable
    location: int
    numbers: tuple[NumberSlot, ...]
    implicit_metas: tuple[TensorMeta | None, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]
    grads: tuple[Grad, ...]
    rebinds: tuple[tuple[int, int], ...]
    result: Any
    backward: bool
    alternatives: tuple[Alternative, ...]
    tape: Tape | None = None
    piece: Piece | None = None
    divisible: bool = False  #: a backward pass that can be taken to pieces

    @property
    def by_path(self) -> bool:
        """Whether it depends on the whole path before it, and not only on its arguments."""
        return self.backward and self.piece is None


#: A symbol that an iteration has not shown.
UNKNOWN = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Seen:
    """With which sizes a node came in traces.

    Attributes:
        sizes: those that what it does depends on.
        values: combinations of their values; `UNKNOWN` for what a trace did not show.
        example: what the symbols were in one of these traces.
        ranges: what each of the sizes may be, if that is known.
    """

    sizes: tuple[Dimension, ...]
    values: frozenset[tuple[int, ...]]
    example: Mapping[int, int]
    ranges: tuple[Symbol, ...] = ()


def is_shaped_by_data(node: Node) -> bool:
    """Whether values decide about the shapes of a node's outputs.

    In a backward pass they decide as they did in the forward pass, which Python knows by then.
    """
    return not node.backward and any(o.shaped_by_data for o in node.operations)


def symbols_of(node: Node) -> frozenset[int]:
    """The symbols that have to be known when a node is taken: those that its own values do not decide."""
    found: set[int] = set()
    key: Any = node.key
    for meta in (*key[2], *node.implicit_metas):
        if meta is not None:
            found |= symbols_in((*meta.shape, *meta.stride))
    found |= symbols_in(tuple(slot.value for slot in node.numbers))
    for operation in node.operations:
        found |= symbols_in(operation.args)
        for result in operation.results:
            if result is not None:
                found |= symbols_in((*result.meta.shape, *result.meta.stride))
    if is_shaped_by_data(node):
        for output in node.outputs:
            found -= symbols_in(output.meta.shape)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class TraceGraph:
    """The merged traces.

    Attributes:
        nodes: by id; ids are a topological order.
        edges: children of each node in the order in which traces took them, `START` included.
        captured: uid of each captured external tensor.
        shared: groups of external tensors that shared memory in some trace (or may be the same).
        traces: how many traces were merged.
        symbols: what each symbol in sizes may be.
        seen: of nodes with sizes that vary, with which sizes they came.
        hooks: how many hooks each captured tensor has.
        paths: the steps of each trace, where backward passes are in pieces.
        general: whether the latest trace differs from others in sizes only, all of which are symbolic.
    """

    nodes: tuple[Node, ...]
    edges: Mapping[int, tuple[int, ...]]
    captured: tuple[int, ...]
    shared: tuple[frozenset[Captured | Fed], ...]
    traces: int
    symbols: tuple[Symbol, ...] = ()
    seen: Mapping[int, Seen] = field(default_factory=dict)
    hooks: tuple[Hooks, ...] = ()
    paths: tuple[frozenset[int], ...] = ()
    general: bool = False

    def __str__(self) -> str:
        from coexec.tracegraph.text import format_graph

        return format_graph(self)


def meta_of_source(
    graph: TraceGraph, node: Node, index: int, externals: Mapping[Captured | Fed, TensorMeta]
) -> TensorMeta | None:
    """The metadata of a source of a node, whichever of its alternatives is taken.

    An argument of the node that is this source says its sizes, since what makes it in another alternative may
    make it larger. None if nothing says what it is.
    """
    sources = [a.sources[index] for a in node.alternatives]
    metas = [_meta_of(graph, source, externals) for source in sources]
    meta = metas[0]
    if meta is None:
        return None
    same = {m and (m.shape, m.stride, m.dtype, m.device) for m in metas}
    if len(same) == 1 and not meta.is_symbolic:
        return meta
    arguments: tuple[TensorMeta, ...] = node.key[2]  # type: ignore[index]  # made by the recorder
    for position, own in enumerate(arguments):
        pairs = zip(node.alternatives, sources, strict=True)
        if all(_is_source(graph, a.bindings[position], source) for a, source in pairs):
            return replace(meta, shape=own.shape, stride=own.stride)
    return meta if len(set(sources)) == 1 else None


def _meta_of(
    graph: TraceGraph, source: NodeSource, externals: Mapping[Captured | Fed, TensorMeta]
) -> TensorMeta | None:
    """What a source is, in the sizes of what made it."""
    if isinstance(source, Computed):
        result = graph.nodes[source.event].operations[source.operation].results[source.result]
        return None if result is None else result.meta
    if isinstance(source, Produced):
        return graph.nodes[source.event].outputs[source.output].meta
    return meta_of(source.value) if isinstance(source, Constant) else externals.get(source)


def _is_source(graph: TraceGraph, binding: NodeBinding, source: NodeSource) -> bool:
    return binding == source or (isinstance(binding, Produced) and _value(graph, binding) == source)


def _value(graph: TraceGraph, made: Produced) -> Computed | None:
    value = graph.nodes[made.event].outputs[made.output].value
    return Computed(made.event, value.operation, value.result) if isinstance(value, Local) else None


def varying_captures(graph: TraceGraph) -> set[int]:
    """The captured tensors that nodes take in several sizes: no program can say what such a tensor is."""
    metas: dict[int, set[object]] = defaultdict(set)
    for binding, meta in _external_arguments(graph):
        if isinstance(binding, Captured):
            metas[binding.index].add((meta.shape, meta.stride, meta.dtype))
    return {index for index, found in metas.items() if len(found) > 1}


def external_metas(graph: TraceGraph) -> dict[Captured | Fed, TensorMeta]:
    """The metadata of external tensors, from the nodes that take them as arguments."""
    metas: dict[Captured | Fed, TensorMeta] = {}
    for binding, meta in _external_arguments(graph):
        metas.setdefault(binding, meta)
    return metas


def _external_arguments(graph: TraceGraph) -> Iterator[tuple[Captured | Fed, TensorMeta]]:
    """The external tensors among the arguments of nodes, with what each node takes them for."""
    for node in graph.nodes:
        arguments: tuple[TensorMeta, ...] = node.key[2]  # type: ignore[index]  # made by the recorder
        metas = (*arguments, *node.implicit_metas)
        for alternative in node.alternatives:
            for binding, meta in zip(alternative.bindings, metas, strict=True):
                if isinstance(binding, (Captured, Fed)) and meta is not None:
                    yield binding, meta
