"""Reachability, order and groups are those of networkx."""

import subprocess
import sys
from graphlib import CycleError

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coexec.tracegraph.order import Groups, before_each, in_order, reachable, turned_around

NODES = st.integers(0, 9)
PAIRS = st.lists(st.tuples(NODES, NODES), max_size=30)


def _targets(pairs):
    return {s: [t for source, t in pairs if source == s] for s, _ in pairs}


@given(PAIRS, NODES)
def test_what_can_be_reached_is_what_networkx_finds(pairs, start):
    graph = nx.DiGraph(pairs)
    graph.add_node(start)
    assert reachable(_targets(pairs), start) == nx.descendants(graph, start) | {start}
    assert reachable(turned_around(_targets(pairs)), start) == nx.ancestors(graph, start) | {start}


@given(PAIRS)
def test_the_order_is_the_first_topological_one(pairs):
    acyclic = [(s, t) for s, t in pairs if s != t]
    graph = nx.DiGraph((min(p) * 7 % 10, max(p) * 7 % 10) for p in acyclic)  # not the order of the numbers
    graph.add_nodes_from(range(10))
    sources = {n: list(graph.predecessors(n)) for n in graph}
    assert in_order(sources) == list(nx.lexicographical_topological_sort(graph))


@given(PAIRS, st.sets(NODES))
def test_the_nodes_before_each_are_its_ancestors_among_those_that_count(pairs, nodes):
    edges = [(min(p), max(p)) for p in pairs if p[0] != p[1]]
    among = nx.DiGraph(edges).subgraph(nodes).copy()
    among.add_nodes_from(nodes)
    before = before_each(_targets(edges), nodes)
    assert before == {n: sum(1 << a for a in nx.ancestors(among, n)) for n in nodes}


def test_a_cycle_has_no_order():
    with pytest.raises(CycleError):
        in_order({0: [1], 1: [0]})


@given(st.lists(st.lists(NODES, min_size=1, max_size=4), max_size=8))
def test_groups_are_connected_components(joins):
    groups, graph = Groups(), nx.Graph()
    for items in joins:
        groups.join(*items)
        graph.add_nodes_from(items)
        graph.add_edges_from((items[0], other) for other in items[1:])
    assert set(groups.all()) == {frozenset(c) for c in nx.connected_components(graph)}
    for one in graph:
        for other in graph:
            assert (groups[one] == groups[other]) == nx.has_path(graph, one, other)


def test_training_does_not_import_networkx():
    program = """
import sys, torch, coexec
weight = torch.ones(4, requires_grad=True)
for _ in range(5):
    with coexec.GradientTape():
        (weight * 2).sum().backward()
assert coexec.explain().programs[0].traces > 0
assert "networkx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
