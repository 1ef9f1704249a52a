"""Every fused subgraph that a pattern rule allows in a graph.

In:  an OpGraph and a PatternRule.
Out: the masks of all groups that are one kernel by the rule (`PatternRule` says what that means).

A group grows from its sink towards its inputs: an operation may join once all that read it are
inside, so that only the sink's result leaves and the group is convex by construction. The rule is
asked once for each question and its answers kept. Growth that no answer could ever allow is cut.
"""

from __future__ import annotations

from placement.errors import PatternError, RuleExplosion
from placement.graph import OpGraph, bits
from placement.patterns.rules import PatternRule, Site, immediate_post_dominators


def generate(graph: OpGraph, rule: PatternRule) -> list[int]:
    """The groups of a rule, as masks, smallest sink first.

    Raises:
        RuleExplosion: if more than `rule.max_groups` groups have to be looked at.
        PatternError: if the rule raises, or gives something that is no kind.
    """
    asked = _Asked(graph, rule)
    found: list[int] = []
    looked_at = 0
    for sink in range(len(graph)):
        if not asked.kind(sink):
            continue
        seen = {1 << sink}
        pending = [1 << sink]
        while pending:
            group = pending.pop()
            looked_at += 1
            if looked_at > rule.max_groups:
                raise RuleExplosion(
                    f"{type(rule).__name__} allows more than {rule.max_groups} subgraphs; it was at those "
                    f"that end in {graph.ops[sink]}. Make fusion_rule refuse more, lower max_ops "
                    f"({rule.max_ops}), or raise max_groups if the time for it is well spent."
                )
            if asked.allows(group):
                found.append(group)
            if group.bit_count() >= rule.max_ops:
                continue
            for index in bits(_joinable(graph, group)):
                grown = group | 1 << index
                if grown not in seen and asked.could_join(index):
                    seen.add(grown)
                    pending.append(grown)
    return found


def _joinable(graph: OpGraph, group: int) -> int:
    """The operations whose every reader is in the group and whose result isn't returned."""
    above = 0
    for index in bits(group):
        above |= graph.reads[index]
    out = 0
    for index in bits(above & ~group & ~graph.leaving):
        if not graph.readers[index] & ~group:
            out |= 1 << index
    return out


class _Asked:
    """A rule's answers on one graph."""

    def __init__(self, graph: OpGraph, rule: PatternRule) -> None:
        self.graph = graph
        self.rule = rule
        self.sites = [Site(graph, op) for op in graph.ops]
        self.after = immediate_post_dominators(graph)
        self.kinds: list[int | None] = [None] * len(graph)
        self.answers: dict[tuple[int, int], bool] = {}
        self.joinable: dict[int, bool] = {}

    def kind(self, index: int) -> int:
        """What `op_rule` says; 0 for False."""
        known = self.kinds[index]
        if known is None:
            answer = self._ask("op_rule", self.sites[index])
            if not isinstance(answer, int) or answer < 0:
                raise PatternError(
                    f"{type(self.rule).__name__}.op_rule gave {answer!r} for {self.graph.ops[index]}. "
                    "It must give False, True or a positive number."
                )
            known = self.kinds[index] = int(answer)
        return known

    def fuses(self, kind: int, index: int) -> bool:
        """What `fusion_rule` says about growing from an operation."""
        key = kind, index
        if key not in self.answers:
            sink = self.after[index]
            self.answers[key] = sink is not None and bool(
                self._ask("fusion_rule", kind, self.sites[index], self.sites[sink])
            )
        return self.answers[key]

    def could_join(self, index: int) -> bool:
        """Whether an operation could be in any group below its sink: some kind makes its growth valid."""
        if index not in self.joinable:
            own = self.kind(index)
            possible = {own} | {self.kind(i) for i in bits(self.graph.ancestors[index])}
            self.joinable[index] = bool(own) and any(self.fuses(k, index) for k in possible if k >= own)
        return self.joinable[index]

    def allows(self, group: int) -> bool:
        """Whether the rule accepts each growth within a group that only its sink leaves."""
        sink = group.bit_length() - 1
        for index in bits(group & ~(1 << sink)):
            before = self.graph.ancestors[index] & group | 1 << index
            if not self.fuses(max(self.kind(i) for i in bits(before)), index):
                return False
        return True

    def _ask(self, method: str, *arguments: object) -> object:
        try:
            return getattr(self.rule, method)(*arguments)
        except Exception as error:
            site = next(a for a in arguments if isinstance(a, Site))
            raise PatternError(
                f"{type(self.rule).__name__}.{method} raised {type(error).__name__}: {error}, "
                f"when asked about {site.op}."
            ) from error
