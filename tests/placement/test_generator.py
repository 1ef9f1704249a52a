"""The pattern generator against an exhaustive search over all subsets, under random rules."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import PatternError, RuleExplosion
from placement.graph import bits
from placement.patterns.generator import generate
from placement.patterns.rules import PatternRule, Site, check_path, immediate_post_dominators
from tests.placement.graphs import aten, op_graph, op_graphs


class RandomRule(PatternRule):
    """Answers at random, but the same each time."""

    max_groups = 1_000_000

    def __init__(self, seed: int, accepts: float, fuses: float, max_ops: int) -> None:
        self.seed, self.accepts, self.fuses, self.max_ops = seed, accepts, fuses, max_ops

    def _draw(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, key)))

    def op_rule(self, node: Site) -> int:
        draw = self._draw("op", node.op.index)
        return draw.randint(1, 3) if draw.random() < self.accepts else 0

    def fusion_rule(self, kind: int, source: Site, sink: Site) -> bool:
        return self._draw("fusion", kind, source.op.index, sink.op.index).random() < self.fuses


def exhaustive(graph, rule) -> set[int]:
    """All subsets that are one kernel by the definition in PatternRule, checked one by one."""
    found = set()
    after = post_dominators(graph)
    sites = [Site(graph, op) for op in graph.ops]
    kinds = [rule.op_rule(site) for site in sites]
    for mask in range(1, 1 << len(graph)):
        members = list(bits(mask))
        if len(members) > rule.max_ops or not all(kinds[i] for i in members):
            continue
        if not (graph.is_convex(mask) and graph.is_connected(mask) and graph.sinks(mask).bit_count() == 1):
            continue
        sink = graph.sinks(mask).bit_length() - 1
        for i in members:
            if i != sink:
                before = [j for j in members if j == i or graph.ancestors[i] >> j & 1]
                if not rule.fusion_rule(max(kinds[j] for j in before), sites[i], sites[after[i]]):
                    break
        else:
            found.add(mask)
    return found


def post_dominators(graph) -> dict[int, int | None]:
    """Immediate post-dominators by NetworkX, on the reversed graph with an exit."""
    reverse = nx.DiGraph()
    reverse.add_nodes_from(["exit", *range(len(graph))])
    for op in graph.ops:
        reverse.add_edges_from((op.index, i) for i in bits(graph.reads[op.index]))
        if graph.leaving >> op.index & 1:
            reverse.add_edge("exit", op.index)
    found = nx.immediate_dominators(reverse, "exit")
    return {i: None if found.get(i) == "exit" else found.get(i) for i in range(len(graph))}


@given(
    op_graphs(),
    st.integers(0, 10_000),
    st.sampled_from([0.6, 0.9, 1.0]),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.integers(1, 10),
)
def test_the_generator_finds_what_exhaustive_search_finds(graph, seed, accepts, fuses, max_ops):
    rule = RandomRule(seed, accepts, fuses, max_ops)
    found = generate(graph, rule)
    assert len(found) == len(set(found))
    assert set(found) == exhaustive(graph, rule)


@given(op_graphs())
def test_post_dominators_are_those_that_networkx_finds(graph):
    assert dict(enumerate(immediate_post_dominators(graph))) == post_dominators(graph)


class Elementwise(PatternRule):
    """The paper's example: elementwise operations join what comes before them."""

    def op_rule(self, node: Site) -> bool:
        return node.name in ("relu", "neg", "add")

    def fusion_rule(self, kind: int, source: Site, sink: Site) -> bool:
        return check_path(source, sink, lambda n: n.name in ("neg", "add"))


def test_a_rule_grows_over_a_diamond_at_once():
    graph = op_graph(
        [
            (aten.relu.default, [-1]),
            (aten.neg.default, [0]),
            (aten.neg.default, [0]),
            (aten.add.Tensor, [1, 2]),
        ],
        [3],
    )
    assert set(generate(graph, Elementwise())) == {
        0b0001,
        0b0010,
        0b0100,
        0b1000,
        0b1010,
        0b1100,
        0b1110,
        0b1111,
    }


def test_a_rule_that_explodes_is_stopped_with_what_to_do():
    calls = [(aten.relu.default, [-1]) for _ in range(12)]
    sums = [(aten.add.Tensor, [0, 1])] + [(aten.add.Tensor, [11 + i, i + 1]) for i in range(1, 11)]
    graph = op_graph([*calls, *sums], [22])

    class Everything(PatternRule):
        max_groups = 500

        def op_rule(self, node):
            return True

        def fusion_rule(self, kind, source, sink):
            return True

    with pytest.raises(RuleExplosion, match=r"Everything allows more than 500 .*lower max_ops"):
        generate(graph, Everything())


def test_a_rule_that_raises_is_named_with_the_operation():
    class Broken(PatternRule):
        def op_rule(self, node):
            raise KeyError("oops")

    graph = op_graph([(aten.relu.default, [-1])], [0])
    with pytest.raises(
        PatternError, match=r"Broken.op_rule raised KeyError: 'oops', when asked about %0 = relu"
    ):
        generate(graph, Broken())


def test_a_rule_that_gives_no_kind_is_refused():
    class Vague(PatternRule):
        def op_rule(self, node):
            return "yes"

    graph = op_graph([(aten.relu.default, [-1])], [0])
    with pytest.raises(PatternError, match=r"Vague.op_rule gave 'yes'"):
        generate(graph, Vague())
