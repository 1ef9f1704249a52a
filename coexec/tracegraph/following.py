"""Nodes whose arguments are those of an earlier node.

In:  a TraceGraph whose backward passes are in pieces.
Out: the same graph; where a node takes whatever an earlier node has taken, each of its alternatives is said
     to come after one of the other's.

A layer that others may be left out in front of reads its input several times: for its norm, for the addition
behind it, and in the backward pass. Which input that is, the graph has to be told once. A choice parts
compiled blocks, so each one that is left out makes one block of two.

A piece of a backward pass reads what its call has read. For other nodes it is a guess, made where no trace is
against it; an iteration in which it is wrong finds no alternative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coexec.tracegraph.graph import START, Alternative, Node, NodeBinding, NodeSource, node_of, step_of
from coexec.tracegraph.order import turned_around
from coexec.tracegraph.tape import Passed


def following(
    nodes: Sequence[Node], edges: Mapping[int, Sequence[int]], paths: Sequence[frozenset[int]]
) -> list[Node]:
    """Finds for each node with several alternatives an earlier one that decides which of them is taken."""
    nodes = [_as_its_call(n, nodes[n.piece.of]) if isinstance(n.piece, Passed) else n for n in nodes]
    out = list(nodes)
    sources = turned_around(edges)
    for node in nodes:
        if len(node.alternatives) < 2 or any(a.path is not None or a.pins for a in node.alternatives):
            continue
        for before in _candidates(node, nodes, sources):
            made = _after(node, nodes[before], paths)
            if made is not None:
                out[node.id] = made
                break
    return out


def _as_its_call(node: Node, call: Node) -> Node:
    """A piece of a backward pass with those of its alternatives that have saved what its call may have."""
    assert isinstance(node.piece, Passed)
    saved = node.piece.saved
    if not saved:
        return node
    possible = {tuple([a.bindings[i] for i in saved]) for a in call.alternatives}
    alternatives = tuple([a for a in node.alternatives if a.bindings[-len(saved) :] in possible])
    return replace(node, alternatives=alternatives)


def _candidates(node: Node, nodes: Sequence[Node], sources: Mapping[int, Sequence[int]]) -> list[int]:
    """Nodes with several alternatives that every path to a node goes through, the latest first."""
    if isinstance(node.piece, Passed):
        return [node.piece.of] if len(nodes[node.piece.of].alternatives) > 1 else []
    found = []
    at = node.id
    while len(sources.get(at, ())) == 1 and sources[at][0] != START:
        at = sources[at][0]
        if len(nodes[at].alternatives) > 1:
            found.append(at)
    return found


def _after(node: Node, before: Node, paths: Sequence[frozenset[int]]) -> Node | None:
    """The node with its alternatives after those of another one; None if a trace is against that."""
    chosen, own = _choice(before.alternatives), _choice(node.alternatives)
    if chosen is None or own is None:
        return None
    for value, alternative in own.items():
        step = step_of(node.id, alternative.number)
        needed = step_of(before.id, chosen[value].number) if value in chosen else None
        if any(step in path and needed not in path for path in paths):
            return None
    both = {value: (alternative, chosen[value]) for value, alternative in own.items() if value in chosen}
    for source in range(len(node.alternatives[0].sources)):
        if both and same_choice([(a.sources[source], b.sources) for a, b in both.values()]) is None:
            return None
    alternatives = [replace(a, after=step_of(before.id, b.number)) for a, b in both.values()]
    return replace(node, alternatives=tuple(alternatives)) if alternatives else None


def _choice(alternatives: Sequence[Alternative]) -> dict[NodeBinding, Alternative] | None:
    """The alternatives by the one value in which they differ; None if it is not one."""
    first = alternatives[0].bindings
    columns = [i for i in range(len(first)) if any(a.bindings[i] != first[i] for a in alternatives)]
    if not columns or any(len({a.bindings[i] for i in columns}) > 1 for a in alternatives):
        return None
    found = {a.bindings[columns[0]]: a for a in alternatives}
    return found if len(found) == len(alternatives) else None


def same_choice(pairs: Sequence[tuple[NodeSource, Sequence[NodeSource]]]) -> int | None:
    """Which source of another node a source is, in all pairs of alternatives; -1 if it is always the same."""
    if len({source for source, _ in pairs}) == 1:
        return -1
    count = len(pairs[0][1])
    return next((j for j in range(count) if all(source == theirs[j] for source, theirs in pairs)), None)


def argument_of_before(node: Node, nodes: Sequence[Node], argument: int) -> tuple[int, int] | None:
    """The node that decides about an argument of a node, and which of its arguments it is there."""
    if len(node.alternatives) < 2:
        return None
    found = pairs_with_before(node, nodes)
    if found is None:
        return None
    before, pairs = found
    positions = range(len(pairs[0][1].bindings))
    same = next((p for p in positions if all(a.bindings[argument] == b.bindings[p] for a, b in pairs)), None)
    return None if same is None else (before, same)


def pairs_with_before(
    node: Node, nodes: Sequence[Node]
) -> tuple[int, list[tuple[Alternative, Alternative]]] | None:
    """The node that decides which alternative is taken, and its alternatives with those that come after.

    None if there is no such node, or if none of its alternatives is taken any more.
    """
    own = {a.after: a for a in node.alternatives if a.after is not None}
    if not own:
        return None
    before = nodes[node_of(next(iter(own)))]
    steps = ((step_of(before.id, a.number), a) for a in before.alternatives)
    pairs = [(own[step], a) for step, a in steps if step in own]
    return (before.id, pairs) if pairs else None
