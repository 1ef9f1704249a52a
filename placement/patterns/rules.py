"""PatternRule: which operations a backend runs, and which of them it runs as one.

A rule is asked about one operation (`op_rule`) and about growing a group (`fusion_rule`). From the
answers, the generator finds every subgraph that the backend would run as a single kernel (Collage,
section 2.3, figure 2.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from placement.graph import Op, OpGraph, bits


@dataclass(frozen=True)
class Site:
    """An operation in its graph, as rules see it."""

    graph: OpGraph
    op: Op

    @property
    def name(self) -> str:
        """The short name, such as `conv2d`."""
        return self.op.name

    def attr(self, name: str) -> object:
        """An attribute by its schema's name, such as `groups`."""
        return self.op.attributes[name]

    def between(self, sink: Site) -> tuple[Site, ...]:
        """The operations on the paths from here to `sink`, both left out."""
        inner = self.graph.descendants[self.op.index] & self.graph.ancestors[sink.op.index]
        return tuple(Site(self.graph, op) for op in self.graph.members(inner))


class PatternRule:
    """What a backend says about fusion. Subclass it; both methods may use anything that Python has.

    A group of operations is one kernel of the backend when

    - it hangs together, and only the result of its last operation, its sink, is used outside;
    - `op_rule` accepts each of its operations;
    - for each operation but the sink, `fusion_rule` accepts growing the group from that operation to
      its immediate post-dominator, the first operation that all paths from it go through.
    """

    max_ops: int = 16
    """The largest group that is looked for, in operations."""
    max_groups: int = 20_000
    """How many groups may be looked at in one graph before the rule counts as exploding."""

    def op_rule(self, node: Site) -> bool | int:
        """Whether this operation runs on the backend.

        Returns:
            False, or its kind: a positive number, larger for what dominates a group (True is 1).
        """
        raise NotImplementedError

    def fusion_rule(self, kind: int, source: Site, sink: Site) -> bool:
        """Whether a group may grow from `source` to `sink`, its immediate post-dominator.

        Args:
            kind: the largest kind among `source` and what comes before it in the group.
            source: the operation from which the group grows.
            sink: the operation up to which it grows; what lies between them comes along.
        """
        return False


def check_path(source: Site, sink: Site, accepts: Callable[[Site], bool]) -> bool:
    """Whether a function accepts every operation on the paths from `source` to `sink`, `sink` included."""
    return accepts(sink) and all(accepts(site) for site in source.between(sink))


def immediate_post_dominators(graph: OpGraph) -> tuple[int | None, ...]:
    """For each operation, the first one that all paths from it to the graph's results go through.

    None where there is none: the operation's own result is returned, or the paths end apart.
    """
    exit_ = len(graph)
    # The candidates of an operation are what all of its readers have in common, each with itself.
    chains: list[int] = [0] * len(graph)
    out: list[int | None] = [None] * len(graph)
    for index in reversed(range(len(graph))):
        common = -1
        for reader in bits(graph.readers[index]):
            common &= chains[reader] | 1 << reader
        if common == -1 or graph.leaving >> index & 1:
            common = 0
        chains[index] = common
        first = next(bits(common), exit_)
        out[index] = first if first < exit_ else None
    return tuple(out)
