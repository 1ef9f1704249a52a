"""What a graph's node leads to, an order of its nodes, and which things belong together.

networkx answers these questions, too, and `verify` and `draw` use it. Programs that only train do not: it
takes 12 MB and 0.15 s of each process, more than all of coexec, for three short functions.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


def reachable(targets: Mapping[int, Iterable[int]], start: int) -> set[int]:
    """The nodes that edges lead to from `start`, with `start` itself."""
    found, waiting = {start}, [start]
    while waiting:
        fresh = set(targets.get(waiting.pop(), ())) - found
        found |= fresh
        waiting += fresh
    return found


def turned_around(targets: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
    """The same edges, from target to source."""
    sources: dict[int, list[int]] = defaultdict(list)
    for source, to in targets.items():
        for target in to:
            sources[target].append(source)
    return dict(sources)


def before_each(targets: Mapping[int, Iterable[int]], nodes: Collection[int]) -> dict[int, int]:
    """For each of these nodes, those from which edges among them lead to it, as bits.

    Args:
        targets: where edges lead to: numbers of nodes are a topological order.
        nodes: all that count.
    """
    before = dict.fromkeys(nodes, 0)
    for source in sorted(nodes):
        above = before[source] | 1 << source
        for target in targets.get(source, ()):
            if target in before:
                before[target] |= above
    return before


def in_order(sources: Mapping[int, Iterable[int]]) -> list[int]:
    """The nodes of an acyclic graph, each behind its sources, and the smallest first where several may be.

    Args:
        sources: where the edges to each node come from; nodes without any are keys, too.

    Raises:
        graphlib.CycleError: if the graph has a cycle.
    """
    sorter = TopologicalSorter(sources)
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for node in sorter.get_ready():
            heapq.heappush(ready, node)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


class Groups(Generic[T]):
    """Disjoint sets: what was joined, by itself or by way of others, is in one group.

    Union by size with path halving (Tarjan and van Leeuwen, 1984, section 2).
    """

    def __init__(self) -> None:
        self._above: dict[T, T] = {}
        self._size: dict[T, int] = {}

    def __getitem__(self, item: T) -> T:
        """What stands for the group of `item`, until the group is joined with another."""
        above = self._above
        if item not in above:
            above[item], self._size[item] = item, 1
            return item
        while above[item] != item:
            above[item] = item = above[above[item]]
        return item

    def join(self, first: T, *others: T) -> None:
        """Makes one group of those of all items."""
        root = self[first]
        for other in others:
            small, large = sorted((self[other], root), key=self._size.__getitem__)
            if small != large:
                self._above[small] = large
                self._size[large] += self._size.pop(small)
            root = large

    def all(self) -> list[frozenset[T]]:
        """The groups, in the order in which their first items came."""
        groups: dict[T, list[T]] = defaultdict(list)
        for item in list(self._above):
            groups[self[item]].append(item)
        return [frozenset(g) for g in groups.values()]
