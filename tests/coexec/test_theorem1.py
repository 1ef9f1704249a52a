"""Theorem 1: the switch-cases of Algorithm 1 cover every trace (Terra, definitions 3 and 5)."""

from __future__ import annotations

import itertools

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coexec.tracegraph.cases import assign_cases
from coexec.tracegraph.graph import END, START
from coexec.tracegraph.merge import merge
from coexec.tracegraph.trace import Event, Kind, Trace
from coexec.tracegraph.verify import verify_graph


def event(name):
    """An event without tensors: all that tells it from others is its location."""
    return Event(
        kind=Kind.COMPUTE,
        function=torch.add,
        name=f"op{name}",
        key=(name, None, ()),
        location=name,
        numbers=(),
        inputs=(),
        implicit_metas=(),
        sources=(),
        operations=(),
        outputs=(),
        grads=(),
        rebinds=(),
        result=None,
        backward=False,
    )


def trace(names):
    return Trace(tuple(event(n) for n in names), ())


def in_chain(block):
    return set(itertools.pairwise(block))


def assert_covers(switch_cases, path):
    """Definition 5, for a path given as its nodes without start and end."""
    nodes = [START, *path, END]
    edges = set(itertools.pairwise(nodes))
    operations, covered = [], set()
    for switch_case in switch_cases:
        taken = [(c, edges & set(c.control_edges)) for c in switch_case.cases if edges & set(c.control_edges)]
        assert len(taken) == 1, "exactly one case of each switch-case has a control edge on the path"
        [(case, control)] = taken
        assert len(control) == 1, "and exactly one"
        operations += case.block
        covered |= control | in_chain(case.block)
    assert operations == list(path)
    assert covered | {(nodes[-2], END)} == edges


def assert_mutually_exclusive(switch_cases):
    """Definition 3, and that each node is in one basic block."""
    blocks = [n for s in switch_cases for c in s.cases for n in c.block]
    assert len(blocks) == len(set(blocks))
    for switch_case in switch_cases:
        control = [e for c in switch_case.cases for e in c.control_edges]
        assert len(control) == len(set(control))
        assert all(c.control_edges for c in switch_case.cases)
        for case in switch_case.cases:
            assert not case.block or all(e[1] == case.block[0] for e in case.control_edges)


def all_paths(edges):
    graph = nx.DiGraph((s, t) for s, targets in edges.items() for t in targets)
    return [p[1:-1] for p in nx.all_simple_paths(graph, START, END)]


TRACES = st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=5)


@given(TRACES)
def test_merged_random_traces_are_covered_and_so_is_every_other_path(names):
    graph = merge([trace(n) for n in names])
    verify_graph(graph)
    switch_cases = assign_cases(graph.edges)
    paths = all_paths(graph.edges)
    taken = {tuple(graph.nodes[n].location for n in path) for path in paths}

    assert {tuple(n) for n in names} <= taken
    assert_mutually_exclusive(switch_cases)
    for path in paths:
        assert_covers(switch_cases, path)


@given(TRACES)
def test_merging_a_trace_again_changes_nothing(names):
    once = merge([trace(n) for n in names])
    again = merge([trace(n) for n in [*names, *names]])

    assert again.edges == once.edges
    assert [n.location for n in again.nodes] == [n.location for n in once.nodes]


@st.composite
def random_dags(draw):
    """A graph in which every node is on a path from start to end; ids are no topological order."""
    size = draw(st.integers(1, 7))
    ids = draw(st.permutations(range(size)))
    edges = {START: set(), **{i: set() for i in ids}}
    for position, target in enumerate(ids):
        sources = draw(st.sets(st.sampled_from([START, *ids[:position]]), min_size=1))
        for source in sources:
            edges[source].add(target)
    for i in [START, *ids]:
        if not edges[i] or draw(st.booleans()):
            edges[i].add(END)
    order = draw(st.randoms(use_true_random=False))
    return {s: tuple(order.sample(sorted(t), len(t))) for s, t in edges.items()}


@given(random_dags())
@settings(max_examples=300)
def test_every_path_of_a_random_graph_is_covered(edges):
    switch_cases = assign_cases(edges)

    assert_mutually_exclusive(switch_cases)
    for path in all_paths(edges):
        assert_covers(switch_cases, path)


def test_an_empty_iteration_has_no_switch_cases():
    assert assign_cases({START: (END,)}) == ()
