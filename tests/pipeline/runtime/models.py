"""Small stages of every kind that the tests need, and data for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pipeline.program import Layout
from pipeline.runtime import StageModule

WIDTH = 6


class Middle(nn.Module):
    """Adds its activations, of any number of stages; saves views, shared storages and a dropout mask.

    With `tokens`, each stage gives them as a second output, which has no gradient.
    """

    def __init__(self, *, dropout: float, tokens: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.tokens = tokens

    def forward(self, *inputs):
        x, *others = inputs[:: 2 if self.tokens else 1]
        for other in others:
            x = x + other
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        y = x + self.dropout(self.out(torch.sigmoid(q) * k.tanh() + v))
        return (y, inputs[1]) if self.tokens else y


class First(nn.Module):
    """Reads tokens."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.middle = Middle(**options)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.middle(x, tokens) if self.middle.tokens else self.middle(x)


class Last(nn.Module):
    """Gives the loss against targets, weighted by the tokens if they came all the way."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.middle = Middle(**options)
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, *inputs):
        *activations, targets = inputs
        x = self.middle(*activations)
        if self.middle.tokens:
            x, tokens = x
            x = x * (1 + tokens[..., None] / 10)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_stage(
    layout: Layout, s: int, *, dropout: float = 0.3, tokens: bool = True, optimizer: str = "sgd"
) -> StageModule:
    """Stage `s` in float64, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + s)
        if not layout.predecessors[s]:
            module: nn.Module = First(dropout=dropout, tokens=tokens)
        elif not layout.successors[s]:
            module = Last(dropout=dropout, tokens=tokens)
        else:
            module = Middle(dropout=dropout, tokens=tokens)
    module = module.double()
    if optimizer == "adam":
        return StageModule(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    return StageModule(module, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5))


def make_data(layout: Layout, seed: int = 0) -> Mapping[int, list[torch.Tensor]]:
    """Tokens for the stages that nothing precedes, targets for those that nothing follows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (layout.samples, 3), generator=generator)
    targets = torch.randint(0, 11, (layout.samples, 3), generator=generator)
    data = {}
    for s in range(len(layout.stages)):
        if not layout.predecessors[s]:
            data[s] = [tokens]
        elif not layout.successors[s]:
            data[s] = [targets]
    return data
