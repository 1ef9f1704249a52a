"""A deep and thin multilayer perceptron on handwritten digits: 24 layers that take microseconds each.

Its trait: launching an operation costs more than computing it, so that a step's time is overhead.

Shapes: B batch, N images, P pixels, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.digits import read_digits
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import ClassifierTraining


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch."""

    layers: int
    width: int
    batch_size: int


CONFIGS: dict[Preset, Config] = {
    "small": Config(layers=24, width=32, batch_size=32),
    "full": Config(layers=24, width=256, batch_size=256),
    "tiny": Config(layers=4, width=16, batch_size=32),
}


class MLP(nn.Module):
    """Linear layers, each added to what it was given, so that a deep stack of them learns."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 2))
        self.output = nn.Linear(width, 10)

    def forward(self, images_BP: torch.Tensor) -> torch.Tensor:
        """Return the logits of the ten digits."""
        x_BW = self.input(images_BP)
        for layer in self.layers:
            x_BW = x_BW + F.gelu(layer(x_BW))
        logits: torch.Tensor = self.output(x_BW)
        return logits


class MLPTraining(ClassifierTraining):
    """Adam; logs its loss every 10 steps."""

    def __init__(self, config: Config, device: torch.device) -> None:
        train, test = read_digits(device)
        model = MLP(config.layers, config.width).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        super().__init__(model, optimizer, train=train, test=test, batch_size=config.batch_size)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        images, labels = self.next_batch()
        [optimizer] = self.optimizers
        with tape():
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            optimizer.step()
            self.log(loss)
        return loss


def make(seed: int, preset: Preset) -> MLPTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return MLPTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="mlp",
    description="deep and thin multilayer perceptron (24 layers, Adam) on handwritten digits",
    metric="test accuracy",
    make=make,
)
