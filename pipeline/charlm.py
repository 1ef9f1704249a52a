"""The character model of the benchmark suite as layers: embedding, blocks, head.

In:  its size.
Out: a `Trainable`. The suite is loaded when it is asked for, so that this package does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pipeline.trainable import Trainable


class _Embed(nn.Module):
    """The first layer: bytes to vectors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: torch.Tensor = self.dropout(self.tokens(tokens_BT) + self.positions(positions_T))
        return x_BTD


def make(
    *, blocks: int = 6, width: int = 96, heads: int = 4, context: int = 64, dropout: float = 0.1
) -> Trainable:
    """The model.

    Args:
        blocks: Transformer blocks; there are two more layers, for embedding and head.
        width: Of a vector.
        heads: Of attention.
        context: Bytes in a sample.
        dropout: Share of values that dropout sets to zero.
    """
    suite = import_module("bench.programs.charlm")
    config = suite.Config(
        blocks=blocks, width=width, heads=heads, context=context, batch_size=1, dropout=dropout
    )
    model = suite.CharLM(config)
    text = suite.read_text()
    layers = [_Embed(model), *model.blocks, nn.Sequential(model.norm, model.head)]

    def batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        starts_B = torch.randint(len(text) - context, (samples,), generator=generator)
        windows = text[starts_B[:, None] + torch.arange(context + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return Trainable(layers, _loss, batch, _optimizer)


def _loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)
