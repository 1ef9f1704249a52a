"""Graphs for tests: random ones, and models of which every operation is known."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node

from placement.graph import OpGraph

aten = torch.ops.aten
UNARY = (aten.relu.default, aten.neg.default, aten.exp.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)


def op_graph(calls: list[tuple[object, list[int]]], outputs: list[int], size: int = 4) -> OpGraph:
    """A graph of calls: target and the operations whose results it reads (-1 is the input)."""
    graph = Graph()
    value = torch.zeros(size)
    x = graph.placeholder("x")
    x.meta["val"] = value
    nodes: list[Node] = []
    for target, reads in calls:
        node = graph.call_function(target, tuple(x if i < 0 else nodes[i] for i in reads))
        node.meta["val"] = value
        nodes.append(node)
    graph.output(tuple(nodes[i] for i in outputs))
    return OpGraph.of(GraphModule(nn.Module(), graph))


@st.composite
def op_graphs(draw, most: int = 10) -> OpGraph:
    """Random graphs of unary and binary operations in which every operation is used."""
    count = draw(st.integers(1, most))
    calls: list[tuple[object, list[int]]] = []
    for i in range(count):
        arity = draw(st.integers(1, 2))
        reads = [draw(st.integers(max(-1, i - 5), i - 1)) for _ in range(arity)]
        calls.append((draw(st.sampled_from(UNARY if arity == 1 else BINARY)), reads))
    used = {r for _, reads in calls for r in reads}
    unused = [i for i in range(count) if i not in used]
    extra = draw(st.lists(st.sampled_from(range(count)), max_size=2))
    return op_graph(calls, list(dict.fromkeys([*unused, *extra])))


class Block(nn.Module):
    """A ResNeXt block in small: grouped convolution, batch normalisation, a skip connection."""

    def __init__(self, channels: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels, channels, 1, bias=False)
        self.b1 = nn.BatchNorm2d(channels)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.b2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = torch.relu(self.b1(self.c1(x)))
        return torch.relu(self.b2(self.c2(y)) + x)


class Attention(nn.Module):
    """A transformer layer in small."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.n1(x + self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return self.n2(x + self.f2(nn.functional.gelu(self.f1(x))))


class TwoOutputs(nn.Module):
    """Two inputs, an integer index, a dictionary as output, a value that is both inner and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, index, y, *, scale=None):
        x = self.table(index) + y
        z = self.linear(x).relu()
        return {"sum": x, "out": [z if scale is None else z * scale, z.mean()]}


def seeded(module: nn.Module) -> nn.Module:
    """The module in evaluation mode with reproducible weights and statistics."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype.is_floating_point:
                tensor.copy_(
                    torch.rand(tensor.shape, generator=generator) - (0.5 if tensor.dim() > 1 else 0.0)
                )
    return module.eval()
