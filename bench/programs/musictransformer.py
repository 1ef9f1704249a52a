"""A Music Transformer: causal attention with relative positions, over synthesised canons.

Its trait: a trainer object that keeps the loss of its latest step in an attribute, which the program reads.

Source: Huang et al., "Music Transformer" (2018), section 3.4.1 (the skewing that turns relative logits into
absolute ones).
Shapes: B batch, T time, H heads, K head size, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bench.data.scores import EVENTS, canon
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import LOG_EVERY, shuffled_batches


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch_size: int
    pieces: int
    dropout: float = 0.1
    warmup_steps: int = 40


CONFIGS: dict[Preset, Config] = {
    "small": Config(layers=3, width=64, heads=4, context=64, batch_size=8, pieces=400),
    "full": Config(layers=6, width=512, heads=8, context=1024, batch_size=16, pieces=3200),
    "tiny": Config(layers=1, width=32, heads=2, context=24, batch_size=4, pieces=200),
}


class RelativeAttention(nn.Module):
    """Causal self-attention with an embedding of each distance."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        head_size = config.width // config.heads
        self.queries = nn.Linear(config.width, config.width)
        self.keys = nn.Linear(config.width, config.width, bias=False)
        self.values = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)
        self.distances_TK = nn.Parameter(torch.randn(config.context, head_size) * head_size**-0.5)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part(x_BTD).view(B, T, self.heads, -1).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        relative_BHTT = self._skew(q_BHTK @ self.distances_TK[-T:].T)
        logits_BHTT = (q_BHTK @ k_BHTK.transpose(-2, -1) + relative_BHTT) / q_BHTK.shape[-1] ** 0.5
        weights_BHTT = self.dropout(logits_BHTT.masked_fill(mask_TT, float("-inf")).softmax(-1))
        y_BTD: torch.Tensor = self.output((weights_BHTT @ v_BHTK).transpose(1, 2).reshape(B, T, D))
        return y_BTD

    @staticmethod
    def _skew(by_distance_BHTT: torch.Tensor) -> torch.Tensor:
        """Move the logits of distances to those of positions."""
        B, H, T, _ = by_distance_BHTT.shape
        return F.pad(by_distance_BHTT, (1, 0)).reshape(B, H, T + 1, T)[:, :, 1:]


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each followed by a layer norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 2 * config.width), nn.ReLU(), nn.Linear(2 * config.width, config.width)
        )
        self.norm1 = nn.LayerNorm(config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, of the same shape."""
        x_BTD = self.norm1(x_BTD + self.dropout(self.attention(x_BTD, mask_TT)))
        x_BTD = self.norm2(x_BTD + self.dropout(self.mlp(x_BTD)))
        return x_BTD


class MusicTransformer(nn.Module):
    """Predicts each next event from the events before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = config.width
        self.events = nn.Embedding(EVENTS, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, EVENTS)

    def forward(self, events_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits, of shape BTV."""
        T = events_BT.shape[1]
        mask_TT = torch.ones(T, T, dtype=torch.bool, device=events_BT.device).triu(1)
        x_BTD = self.dropout(self.events(events_BT) * self.width**0.5)
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_TT)
        logits_BTV: torch.Tensor = self.head(x_BTD)
        return logits_BTV


class Trainer:
    """Holds everything that training needs, and the loss of the latest step."""

    def __init__(self, config: Config, device: torch.device) -> None:
        random = np.random.default_rng(0)
        pieces = torch.tensor(np.stack([canon(config.context + 1, random) for _ in range(config.pieces)]))
        test_pieces = config.pieces // 10
        self.pieces, self.test_pieces = pieces[test_pieces:].to(device), pieces[:test_pieces].to(device)
        self.config = config
        self.model: nn.Module = MusicTransformer(config).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
        self.optimizers = (self.optimizer,)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.steps_per_epoch = len(self.pieces) // config.batch_size
        self.rows = shuffled_batches(len(self.pieces), config.batch_size)
        self.loss_value: torch.Tensor | None = None
        self.logged: list[tuple[int, float]] = []
        self.steps = 0

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        batch_BT = self.pieces[next(self.rows)]
        with tape():
            self._train_step(batch_BT)
            assert self.loss_value is not None
            if self.steps % LOG_EVERY == 0:
                self.logged.append((self.steps, float(self.loss_value)))
        self.steps += 1
        return self.loss_value

    def end_epoch(self) -> None:
        """Nothing is to be done between epochs."""

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss, in nats an event, over canons that are not trained on."""
        self.model.eval()
        losses = [self._loss(batch_BT) for batch_BT in self.test_pieces.split(self.config.batch_size)]
        self.model.train()
        return torch.stack(losses).mean().item()

    def _train_step(self, batch_BT: torch.Tensor) -> None:
        loss = self._loss(batch_BT)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.loss_value = loss.detach()

    def _loss(self, batch_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = self.model(batch_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, 1:].flatten())

    def _rate(self, step: int) -> float:
        """Return the rate as a share of its peak: up linearly, then down with the root of the step."""
        warmed_up = (step + 1) / self.config.warmup_steps
        return float(min(warmed_up, warmed_up**-0.5))


def make(seed: int, preset: Preset) -> Trainer:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return Trainer(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="musictransformer",
    description="transformer with relative attention over synthesised canons; its trainer keeps the loss",
    metric="test loss (nats/event)",
    make=make,
)
