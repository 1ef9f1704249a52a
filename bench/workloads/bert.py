"""BERT base: 12 layers, width 768 (Devlin et al., 2019), as `transformers` has it."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.base import Made, Size, ready


class Encoder(nn.Module):
    """The last hidden states of token numbers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = BertConfig(**({} if size == "full" else small))
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From (batch, length) to (batch, length, width)."""
        hidden: torch.Tensor = self.bert(tokens, use_cache=False).last_hidden_state
        return hidden


def make(size: Size, batch: int, seed: int) -> Made:
    """The encoder and token numbers, without padding."""
    torch.manual_seed(seed)
    model = ready(Encoder(size), seed)
    length = 128 if size == "full" else 8
    return model, (torch.randint(1, 30_000, (batch, length)),)
