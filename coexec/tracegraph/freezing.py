"""A TraceGraph of the drafts of a `Builder`.

In:  drafts of nodes, in the order in which traces showed them.
Out: nodes numbered so that each comes behind those before it, and the number that each draft has become.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coexec.tracegraph.builder import Builder, Draft, NumbersOf
from coexec.tracegraph.graph import END, START, Alternative, Fed, FedNumber, Node, TraceGraph, renumbered_step
from coexec.tracegraph.numbers import same_number
from coexec.tracegraph.order import in_order, turned_around
from coexec.tracegraph.sizes import Size
from coexec.tracegraph.tape import Passed
from coexec.tracegraph.trace import Computed, Number, Operation, Produced, with_leaves


def frozen(builder: Builder) -> tuple[TraceGraph, dict[int, int]]:
    """The graph that a builder has come to, and which node each draft is. The builder stays as it is."""
    drafts = builder.drafts
    sources = turned_around({n: builder.children.get(n, []) for n in range(len(drafts))})
    order = in_order({n: sources.get(n, ()) for n in range(len(drafts))})
    new_id = {old: new for new, old in enumerate(order)} | {START: START, END: END}
    nodes = tuple(_node(drafts[old], drafts, new_id) for old in order)
    edges = {
        new_id[source]: tuple(new_id[t] for t in targets)
        for source, targets in builder.children.items()
        if source != END
    }
    shared = tuple(
        frozenset(Fed(new_id[r.node], r.argument) if isinstance(r, Fed) else r for r in group)
        for group in builder.shared.all()
    )
    return TraceGraph(nodes, edges, tuple(builder.captured), shared, len(builder.paths)), new_id


def _node(draft: Draft, drafts: Sequence[Draft], new_id: Mapping[int, int]) -> Node:
    alternatives = tuple(
        Alternative(
            _renumbered(a.bindings, new_id),  # type: ignore[arg-type]  # kinds are kept
            _renumbered(a.sources, new_id),  # type: ignore[arg-type]  # kinds are kept
            None if a.path is None else tuple(renumbered_step(s, new_id) for s in a.path),
            tuple((new_id[n], slot, value) for n, slot, value in _pins(seen, drafts)),
            number,
        )
        for number, (a, seen) in enumerate(zip(draft.alternatives, draft.seen, strict=True))
    )
    operations = tuple(_renumbered_operation(o, new_id) for o in draft.node.operations)
    piece = draft.node.piece
    if isinstance(piece, Passed):
        piece = replace(piece, of=new_id[piece.of])
    return replace(
        draft.node, id=new_id[draft.node.id], alternatives=alternatives, operations=operations, piece=piece
    )


def _pins(seen: Sequence[NumbersOf], drafts: Sequence[Draft]) -> list[tuple[int, int, Number]]:
    """Numbers that vary in the graph, but never did where these were seen."""
    pins = []
    for (node, slot), value in seen[0].items():
        varies = drafts[node].node.numbers[slot].classes is not None
        if isinstance(value, Size) or not varies:
            continue
        others = [numbers[node, slot] for numbers in seen]
        if all(not isinstance(o, Size) and same_number(o, value) for o in others):
            pins.append((node, slot, value))
    return pins


def _renumbered(refs: Iterable[object], new_id: Mapping[int, int]) -> tuple[object, ...]:
    return tuple(_renumbered_ref(r, new_id) for r in refs)


def _renumbered_ref(ref: object, new_id: Mapping[int, int]) -> object:
    if isinstance(ref, Produced):
        return Produced(new_id[ref.event], ref.output)
    if isinstance(ref, Computed):
        return Computed(new_id[ref.event], ref.operation, ref.result)
    if isinstance(ref, Fed):
        return Fed(new_id[ref.node], ref.argument)
    return ref


def _renumbered_operation(operation: Operation, new_id: Mapping[int, int]) -> Operation:
    def renumber(argument: Any) -> Any:
        if isinstance(argument, FedNumber):
            return FedNumber(tuple(o._replace(node=new_id[o.node]) for o in argument.origins))
        return argument

    return replace(operation, args=with_leaves(operation.args, renumber))
