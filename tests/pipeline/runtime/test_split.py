from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pipeline.runtime.split import backward_input, backward_weight
from pipeline.runtime.stage import StageRunner
from pipeline.runtime.weights import Weights


class Tied(nn.Module):
    """Uses one parameter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(self.inner(x).tanh())


class Product(nn.Module):
    """A branch without inputs of several operators, two of whose edges are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        branch = (self.a.exp() * self.b).sin()
        return (x * branch) * branch.mean() + self.a * self.a


class Attention(nn.Module):
    """As in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)),
    "normalised": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "tied": Tied,
    "product": Product,
    "attention": Attention,
    "no parameters": nn.Tanh,
}


@pytest.mark.parametrize("name", MODULES)
def test_both_parts_give_the_bits_of_the_whole(name):
    torch.manual_seed(0)
    module = MODULES[name]().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    g = torch.randn(8, 6, dtype=torch.float64)
    stage = StageRunner(Weights(module, None), lambda k: nullcontext(), torch.device("cpu"))
    stage.forward(0, (x,), (), 0, again=False)
    (whole,) = stage.backward(0, (g,))
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    stage.forward(1, (x,), (), 0, again=False)
    (found,) = stage.backward_input(1, (g,))
    assert all(p.grad is None for p in module.parameters())
    stage.backward_weight(1)
    assert torch.equal(found, whole)
    for p, e in zip(module.parameters(), expected, strict=True):
        assert torch.equal(p.grad, e)


class Counting(torch.autograd.Function):
    """Counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Counting.runs += 1
        return g


def test_the_way_to_the_inputs_is_not_gone_twice():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return Counting.apply(self.second(Counting.apply(self.first(Counting.apply(x)))))

    module = Counted()
    edge = torch.autograd.graph.get_gradient_edge
    x = torch.randn(8, 6, requires_grad=True)
    y = module(x)
    Counting.runs = 0
    _, rest = backward_input([edge(y)], [edge(x)], [torch.ones(8, 6)])
    backward_weight(rest, list(module.parameters()))
    assert Counting.runs == 3
