from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from pipeline.runtime.entry import Entry
from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.saved import Saved
from pipeline.runtime.storages import addresses


def moved(saved: Saved) -> None:
    """Away and back, as if to another rank: other storages with the same bytes."""
    parts = [part.clone() for part in saved.give()]
    saved.release()
    saved.take(parts)


def gradient(function, x, *, move: bool, **options):
    x = x.clone().requires_grad_()
    saved = Saved(**options)
    with saved.hooks():
        y = function(x)
    saved.finish()
    if move:
        moved(saved)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return g, saved


FUNCTIONS = {
    "shared storage": lambda x: torch.cat([a * b for a, b in zip(x.chunk(2), x.chunk(2)[::-1], strict=True)]),
    "transposed": lambda x: (x.t() @ x).sigmoid(),
    "expanded": lambda x: x[:, :1].expand(8, 6) * x,
    "output saved": lambda x: x.exp().tanh(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5) * x,
    "two types": lambda x: x * x.to(torch.float32).view(torch.int32).ge(0),
    "complex": lambda x: torch.view_as_complex(x.view(8, 3, 2)).conj().pow(2).abs(),
    "empty": lambda x: torch.cat([x, x[:0] * x[:0]]) * x,
    "index": lambda x: x[torch.tensor([1, 1, 3])] * x[0],
    "attention": lambda x: nn.functional.scaled_dot_product_attention(*(x[None, None],) * 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_same_bits_after_moving_away_and_back(name):
    x = torch.randn(8, 6, dtype=torch.float64)
    y = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = FUNCTIONS[name](y)
    (expected,) = torch.autograd.grad(out, y, torch.ones_like(out))
    for move in (False, True):
        torch.manual_seed(0)
        found, _ = gradient(FUNCTIONS[name], x, move=move)
        assert torch.equal(found, expected)


def test_views_of_one_storage_are_held_once():
    x = torch.randn(100, 6, dtype=torch.float64)
    _, saved = gradient(lambda x: x[:50] * x[50:], x, move=True)
    assert saved.sizes == (x.nbytes,)


def test_parameters_stay_where_they_are():
    linear = nn.Linear(6, 6, dtype=torch.float64)
    x = torch.randn(8, 6, dtype=torch.float64)
    _, saved = gradient(linear, x, move=True, keep=addresses(linear.parameters()))
    assert saved.sizes == (x.nbytes,)


def test_a_small_part_of_a_large_storage_is_copied():
    x = torch.randn(1000, 8, dtype=torch.float64)
    found, saved = gradient(lambda x: x[3:5].pow(2), x, move=True)
    assert saved.nbytes == 2 * 8 * 8
    assert torch.equal(found[3:5], 2 * x[3:5])


def test_views_that_cover_a_storage_together_are_not_copied():
    x = torch.randn(90, 8, dtype=torch.float64)
    _, saved = gradient(lambda x: x[:30] * x[30:60] * x[60:], x, move=False)
    assert x.nbytes in saved.sizes


def test_backward_can_ask_twice():
    x = torch.randn(8, 6, requires_grad=True)
    saved = Saved()
    with saved.hooks():
        y = x.exp() * x
    moved(saved)
    first = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(first[0], second[0])


def test_nothing_is_left_when_it_is_released():
    saved = Saved()
    x = torch.randn(8, 6, requires_grad=True)
    with saved.hooks():
        y = x.exp()
        gone = weakref.ref(y.untyped_storage())
        edge = torch.autograd.graph.get_gradient_edge(y)
    saved.release()
    del y
    gc.collect()
    assert gone() is None
    assert saved.nbytes == 0
    assert edge.node is not None


def test_using_what_is_away_is_an_error():
    x = torch.randn(8, 6, requires_grad=True)
    saved = Saved()
    with saved.hooks():
        y = x.exp()
    saved.release()
    with pytest.raises(RunError, match="LOAD it first"):
        y.sum().backward()


def test_a_change_in_place_is_an_error_that_names_the_operation_and_the_line():
    x = torch.randn(8, 6, requires_grad=True)
    saved = Saved()
    with saved.hooks():
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(InPlaceError, match=r"ExpBackward0 at test_saved.py:\d+ was changed in place 1 time"):
        y.sum().backward()


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sigmoid().mul_(2), lambda x: (y := x * 1, z := y * y, y.add_(1), z)[-1]],
    ids=["output", "input"],
)
def test_a_change_within_the_forward_pass_is_found(function):
    with pytest.raises(InPlaceError):
        gradient(function, torch.randn(8, 6), move=False)


def test_a_change_is_found_before_it_is_sent_away():
    x = torch.randn(8, 6, requires_grad=True)
    saved = Saved()
    with saved.hooks():
        y = x.exp()
    y.detach().zero_()
    with pytest.raises(InPlaceError, match="changed in place"):
        saved.give()


def test_a_change_of_a_parameter_is_found():
    linear = nn.Linear(6, 6)
    x = torch.randn(8, 6, requires_grad=True)
    saved = Saved(addresses(linear.parameters()))
    with saved.hooks():
        y = linear(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(InPlaceError, match="AddmmBackward0"):
        y.sum().backward()


def test_an_input_that_nothing_saves_is_let_go():
    x = torch.randn(8, 6)
    entry = Entry((x,))
    (entered,) = entry.enter((x,))
    y = torch.autograd.graph.get_gradient_edge(entered.neg().add(1))
    gone = weakref.ref(x.untyped_storage())
    del x, entered
    gc.collect()
    assert gone() is None
    torch.autograd.backward([y], [torch.ones(8, 6)])
    assert torch.equal(entry.gradients()[0], -torch.ones(8, 6))


def test_an_input_on_which_nothing_depends_has_a_gradient_of_zeros():
    used, unused = torch.randn(2, 3), torch.randn(4, dtype=torch.float64)
    entry = Entry((used, unused))
    a, _ = entry.enter((used, unused))
    a.sum().backward()
    assert [g.tolist() for g in entry.gradients()] == [torch.ones(2, 3).tolist(), [0.0] * 4]
