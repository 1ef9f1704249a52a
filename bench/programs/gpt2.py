"""GPT-2 over lines of the standard library, each batch as long as its longest line.

Its trait: ragged lengths, so nearly every batch has another shape.

The model is `transformers`' with random weights.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
Shapes: B batch, T time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.data.words import MODULES, PADDING, SEPARATOR, Vocabulary, pad, read_texts
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LoggedTraining, shuffled_batches

IGNORED = -100
TEST_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    lines: int
    """Lines of source in one text."""
    context: int
    batch_size: int


CONFIGS: dict[Preset, Config] = {
    "small": Config(layers=3, width=96, heads=4, vocabulary=1000, lines=1, context=40, batch_size=8),
    "full": Config(layers=12, width=768, heads=12, vocabulary=8000, lines=20, context=512, batch_size=16),
    "tiny": Config(layers=1, width=32, heads=2, vocabulary=300, lines=1, context=20, batch_size=4),
}


class GPT2Training(LoggedTraining):
    """AdamW with gradient clipping over batches that are padded to their longest text."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        texts = [text for module in MODULES for text in read_texts(module, config.lines)]
        vocabulary = Vocabulary.of(texts, config.vocabulary)
        encoded = [[*vocabulary.encode(text)[: config.context - 1], SEPARATOR] for text in texts]
        tests = TEST_BATCHES * config.batch_size
        order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(0)).tolist()
        self.test_texts = [encoded[i] for i in order[:tests]]
        self.texts = [encoded[i] for i in order[tests:]]
        self.rows = shuffled_batches(len(self.texts), config.batch_size)
        self.config, self.device = config, device
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocabulary,
                n_positions=config.context,
                n_embd=config.width,
                n_layer=config.layers,
                n_head=config.heads,
                bos_token_id=SEPARATOR,
                eos_token_id=SEPARATOR,
                use_cache=False,
            )
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        super().__init__(model, optimizer, steps_per_epoch=100)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        tokens_BT = self._collate([self.texts[row] for row in next(self.rows).tolist()])
        [optimizer] = self.optimizers
        with tape():
            loss = self._loss(tokens_BT)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            self.log(loss)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of the test batches, in nats a word."""
        self.model.eval()
        size = self.config.batch_size
        batches = [self.test_texts[first : first + size] for first in range(0, len(self.test_texts), size)]
        losses = [self._loss(self._collate(batch)) for batch in batches]
        self.model.train()
        return torch.stack(losses).mean().item()

    def _collate(self, texts: list[list[int]]) -> torch.Tensor:
        return torch.tensor(pad(texts, max(map(len, texts))), device=self.device)

    def _loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        mask_BT = tokens_BT != PADDING
        labels_BT = tokens_BT.masked_fill(~mask_BT, IGNORED)
        output = self.model(input_ids=tokens_BT, attention_mask=mask_BT.long(), labels=labels_BT)
        loss: torch.Tensor = output.loss
        return loss


def make(seed: int, preset: Preset) -> GPT2Training:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return GPT2Training(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="gpt2",
    description="GPT-2 over lines of Python's own sources; every batch is as long as its longest line",
    metric="test loss (nats/word)",
    make=make,
    requires=("transformers",),
)
