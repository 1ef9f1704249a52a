"""A small GPT-style language model over the bytes of Python's own standard library.

Shapes: B batch, T time, H heads, K head size, D model width, V vocabulary.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.words import MODULES
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything

VOCABULARY = 256
BYTES_PER_FILE = 48_000
TEST_SHARE = 0.1
TEST_BATCHES = 4
LOG_EVERY = 10


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch."""

    blocks: int
    width: int
    heads: int
    context: int
    batch_size: int
    dropout: float = 0.1


CONFIGS: dict[Preset, Config] = {
    "small": Config(blocks=3, width=96, heads=4, context=64, batch_size=8),
    "full": Config(blocks=12, width=768, heads=12, context=256, batch_size=32),
    "tiny": Config(blocks=1, width=32, heads=2, context=16, batch_size=4),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        # A key's bias has no effect on the softmax, and its gradient is nothing but rounding errors.
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(x_BTD).split(D, dim=2)
        )
        mixed_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        y_BTD: torch.Tensor = self.output(mixed_BHTK.transpose(1, 2).reshape(B, T, D))
        return y_BTD


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and around a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the same shape."""
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        x_BTD = x_BTD + self.dropout(self.mlp(self.norm2(x_BTD)))
        return x_BTD


class CharLM(nn.Module):
    """Predicts each next byte from the bytes before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits, of shape BTV."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class CharLMTraining:
    """AdamW with gradient clipping; logs its loss every 10 steps."""

    def __init__(self, config: Config, device: torch.device, steps_per_epoch: int) -> None:
        text = read_text().to(device)
        test_bytes = int(len(text) * TEST_SHARE)
        self.train_text, self.test_text = text[:-test_bytes], text[-test_bytes:]
        self.config = config
        self.steps_per_epoch = steps_per_epoch
        self.model: nn.Module = CharLM(config).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizers = (self.optimizer,)
        self.logged: list[tuple[int, float]] = []
        self.steps = 0

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        starts_B = torch.randint(len(self.train_text) - self.config.context, (self.config.batch_size,))
        inputs_BT, targets_BT = self._batch(self.train_text, starts_B)
        with tape():
            logits_BTV = self.model(inputs_BT)
            loss = F.cross_entropy(logits_BTV.view(-1, VOCABULARY), targets_BT.reshape(-1))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if self.steps % LOG_EVERY == 0:
                self.logged.append((self.steps, loss.item()))
        self.steps += 1
        return loss

    def end_epoch(self) -> None:
        """Nothing is to be done between epochs."""

    def evaluate(self) -> float:
        """Return the mean loss, in nats a byte, over fixed positions of the test text."""
        last = len(self.test_text) - self.config.context - 1
        starts = torch.linspace(0, last, TEST_BATCHES * self.config.batch_size).long()
        losses = []
        self.model.eval()
        with torch.no_grad():
            for starts_B in starts.split(self.config.batch_size):
                inputs_BT, targets_BT = self._batch(self.test_text, starts_B)
                logits_BTV = self.model(inputs_BT)
                losses.append(F.cross_entropy(logits_BTV.view(-1, VOCABULARY), targets_BT.reshape(-1)))
        self.model.train()
        return torch.stack(losses).mean().item()

    def _batch(self, text: torch.Tensor, starts_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        windows = text[(starts_B[:, None] + torch.arange(self.config.context + 1)).to(text.device)]
        return windows[:, :-1], windows[:, 1:]


def read_text() -> torch.Tensor:
    """Return the beginnings of some standard library modules as one vector of byte values."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / name).read_bytes()[:BYTES_PER_FILE] for name in MODULES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def make(seed: int, preset: Preset) -> CharLMTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return CharLMTraining(CONFIGS[preset], device_of(preset), steps_per_epoch=100)


PROGRAM = Program(
    name="charlm",
    description="GPT-style language model (attention, AdamW, gradient clipping) over Python's own sources",
    metric="test loss (nats/byte)",
    make=make,
)
