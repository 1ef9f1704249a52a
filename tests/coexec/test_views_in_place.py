"""Operations that change the geometry of a tensor object in place, in functions and called by users."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from coexec.tracegraph.schema import VIEWS
from tests.coexec.harness import coexecuted, compare

#: Functions of PyTorch's that do so, of a vector of four and a matrix of four rows.
FUNCTIONS = {
    "vector @ matrix": lambda v, m: v @ m,
    "vector @ matrices": lambda v, m: v @ torch.stack([m, m * 2]),
    "matrices @ vector": lambda v, m: torch.stack([m.t(), m.t() * 2]) @ v,
    "three factors": lambda v, m: torch.linalg.multi_dot([v, m, m.t()]),
    "a layer of a vector": lambda v, m: F.linear(v, m.t()),
    "a product twice": lambda v, m: (v @ m) * (v @ m).flip(0),
}


def matrix():
    return SimpleNamespace(m=torch.randn(4, 3, requires_grad=True), log=[])


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("gradients", [True, False])
def test_functions_that_turn_what_they_have_made_have_a_graph(function, gradients, compared):
    def step(s, k, tape):
        v = torch.randn(4)
        with tape():
            if gradients:
                s.m.grad = None
                s.result = function(v, s.m)
                s.result.square().sum().backward()
                s.result = s.result.detach()
            else:
                with torch.no_grad():
                    s.result = function(v, s.m)

    assert coexecuted(compared(matrix, step, 8), 4)


def test_vectors_of_many_lengths_have_a_graph_in_pieces_too(in_pieces_always, patient):
    def step(s, k, tape):
        v = torch.randn(2 + k % 7)
        with tape():
            s.m.grad = None
            rows = s.m.repeat(2, 1)[: len(v)]
            for _ in range(1 + k % 3):
                rows = rows + (v @ rows)
            rows.mean().backward()

    assert coexecuted(compare(matrix, step, 30), 8)


@pytest.mark.parametrize(
    "turn",
    [lambda y: y.squeeze_(0), lambda y: y.unsqueeze_(-1), lambda y: y.t_(), lambda y: y.transpose_(0, 1)],
    ids=["squeeze_", "unsqueeze_", "t_", "transpose_"],
)
def test_what_the_program_turns_itself_is_eagers(turn):
    def step(s, k, tape):
        v = torch.randn(4)
        with tape():
            with torch.no_grad():
                y = (s.m * v[:, None])[:1]
                z = y[0] if k % 2 else y
                turn(y)
                s.log = [y.shape, y.stride(), z.shape, y.sum().item(), (z * 2).tolist(), y + 1]

    compare(matrix, step, 8)


@pytest.mark.parametrize(("in_place", "view"), VIEWS.items(), ids=str)
def test_an_operator_in_place_and_the_one_that_gives_a_view_take_the_same(in_place, view):
    def declared(operator):
        return [(a.name, str(a.type), a.default_value) for a in operator._schema.arguments]

    assert declared(in_place) == declared(view)
    assert torch.Tag.inplace_view in in_place.tags
    assert not view._schema.is_mutable
