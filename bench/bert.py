"""The size of the suite's two BERTs.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch_size: int

    def of_transformers(self, **more: Any) -> Any:
        """Return the `BertConfig` of a model of this size."""
        from transformers import BertConfig

        return BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.context,
            **more,
        )
