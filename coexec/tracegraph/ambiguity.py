"""What a `Builder` has made one of, or several, that Python's calls alone do not tell.

In:  drafts of nodes.
Out: events that need more than their arguments to be told apart, and captured tensors that are not the same
     in every iteration.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from itertools import zip_longest

from coexec.tracegraph.builder import Builder, Draft, Identity, Kind
from coexec.tracegraph.graph import END, Captured, Fed, is_shaped_by_data
from coexec.tracegraph.numbers import same_number
from coexec.tracegraph.sizes import Size
from coexec.tracegraph.tape import at_of
from coexec.tracegraph.trace import Number


def indistinct(builder: Builder) -> set[Identity]:
    """Events that come at one point in several nodes which their arguments alone do not tell apart."""
    found: set[Identity] = set()
    for children in builder.children.values():
        alike: dict[Kind, list[Draft]] = defaultdict(list)
        for draft in (builder.drafts[c] for c in children if c != END):
            alike[draft.kind].append(draft)
        for kind, drafts in alike.items():
            if any(_may_be_same_call(a, b) for a, b in itertools.combinations(drafts, 2)):
                found.add(builder.identities.of(kind.identity))
    return found


def conflicting_captures(builder: Builder) -> set[int]:
    """Captured tensors in argument positions that do not always hold the same tensor.

    What one round of a loop does not always take the same, the other rounds will not either.
    """
    uids = {index: uid for uid, index in builder.captured.items()}
    conflicting: set[int] = set()
    for ids in builder.by_kind.values():
        rounds = [_externals_by_argument(builder.drafts[i]) for i in ids]
        for columns in zip_longest(*rounds, fillvalue=frozenset()):
            if any(len(column) > 1 for column in columns):
                externals = frozenset().union(*columns)
                conflicting |= {uids[b.index] for b in externals if isinstance(b, Captured)}
    return conflicting


def _externals_by_argument(draft: Draft) -> list[frozenset[Captured | Fed]]:
    return [
        frozenset(b for b in column if isinstance(b, (Captured, Fed)))
        for column in zip(*(a.bindings for a in draft.alternatives), strict=True)
    ]


def _may_be_same_call(a: Draft, b: Draft) -> bool:
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
