"""Merging one more trace goes on with the latest merge, and comes to the graph of a merge of all traces."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from coexec.tracegraph.builder import Builder, Kind, Premises
from tests.coexec.harness import compare, linear, train, weights
from tests.coexec.test_own_sizes import recurrent, unpadded


@pytest.fixture(params=["whole", "in pieces"])
def either(request, merges, patient):
    """The same, with backward passes whole and in pieces."""
    if request.param == "in pieces":
        request.getfixturevalue("in_pieces_always")
    return merges


def test_a_trace_that_changes_nothing_of_the_others_is_all_that_is_added(merges, in_pieces_always, patient):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            if k % 5 == 3:
                h = h.tanh()
            elif k % 5 == 4:
                h = h.relu()
            train(s, h.square().mean())

    compare(functools.partial(linear, momentum=0), step, 12)

    assert [(n, added) for n, added in merges.added if n > 2] == [(3, 1), (4, 1)]


def test_sizes_that_vary_from_call_to_call_are_those_of_a_merge_of_all(merges, in_pieces_always, patient):
    compare(recurrent, unpadded, 40)

    assert len(merges.added) > 6
    assert any(added == 1 for n, added in merges.added if n > 2)  # whose sizes were known


def test_a_tensor_that_another_iteration_uses_again_is_captured_in_both(either):
    def make():
        s = linear()
        s.data = [torch.randn(5, 4) for _ in range(4)]
        return s

    def step(s, k, tape):
        x = s.data[[0, 1, 2, 0, 1, 3, 3, 0][k % 8]]
        with tape():
            h = s.model(x)
            if k % 4 == 2:
                h = h.exp().clamp(max=3)
            train(s, h.square().mean())

    compare(make, step, 16)

    assert len(either.added) >= 3


def test_what_is_in_a_loop_in_a_later_trace_only_is_in_one_in_all(either):
    def step(s, k, tape):
        rounds = [1, 1, 3, 2, 4, 1][k % 6]
        with tape():
            h = s.model(torch.randn(5, 4))
            for _ in range(rounds):
                h = F.dropout(h.tanh(), 0.5)
            train(s, h.square().mean())

    compare(linear, step, 18)

    assert len(either.added) >= 3


def test_a_call_that_reads_something_else_on_another_path_is_told_apart_in_all(either):
    def step(s, k, tape):
        with tape():
            a, b = s.a * 2, s.b * 3
            x = (a if k % 4 < 2 else b).detach()
            y = x.detach() + 1
            if k % 4 == 3:
                y = y + a.detach()
            (y * a * b).sum().backward()
            return y.sum()

    compare(weights("a", "b", size=4), step, 16)

    assert len(either.added) >= 3


def test_traces_from_before_a_hook_are_forgotten_in_the_memory_too(either):
    def step(s, k, tape):
        if k == 5:
            s.handle = s.model.weight.register_hook(lambda g: g * 2)
        with tape():
            h = s.model(torch.randn(5, 4))
            if k in (3, 8):
                h = h.tanh()
            train(s, h.square().mean())

    compare(linear, step, 14)

    counts = [n for n, _ in either.added]
    assert any(later <= earlier for earlier, later in itertools.pairwise(counts))


def test_symbols_keep_their_order_when_one_more_dimension_varies(merges, in_pieces_always, patient):
    def step(s, k, tape):
        x = torch.randn(2 + k % 5, 3 if k < 6 else 4 + k % 4, 9 - k % 3)
        with tape():
            for y in x.split(1 + k % 2):
                (s.a * y.exp().sum()).backward()

    compare(weights("a", size=1), step, 24)

    assert any(added == 1 for n, added in merges.added if n > 2)


# --- what a builder goes on with ----------------------------------------------------------------------


def premises(**changed):
    known = Premises(True, frozenset({1, 2}), frozenset({("read",)}), frozenset({("round",)}))
    return replace(known, **changed)


def built():
    """A builder of a trace with the external tensors 1, 2 and 3, and calls of `read`, `round` and `call`."""
    builder = Builder(premises())
    builder.uids |= {1, 2, 3}
    for call in (("read",), ("round",), ("call",)):
        builder.by_kind[Kind(builder.identities.number(call))] = []
    return builder


@pytest.mark.parametrize(
    "changed",
    [
        {"apart": False},
        {"captured": frozenset({1})},
        {"captured": frozenset({1, 2, 3})},
        {"path_dependent": frozenset()},
        {"path_dependent": frozenset({("read",), ("call",)})},
        {"repeated": frozenset()},
        {"repeated": frozenset({("round",), ("call",)})},
    ],
)
def test_a_graph_is_built_anew_if_something_else_is_known_of_what_is_in_it(changed):
    assert not built().goes_on_with(premises(**changed))


def test_a_graph_is_built_on_if_what_is_new_is_not_in_it():
    builder = built()
    later = premises(
        captured=frozenset({1, 2, 4}),
        path_dependent=frozenset({("read",), ("new",)}),
        repeated=frozenset({("round",), ("new",)}),
    )

    assert builder.goes_on_with(later)
    assert builder.premises == later
    assert builder.identities.number(("new",)) in builder.path_dependent & builder.repeated
