"""A convolutional classifier of scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.digits import read_digits
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything

LOG_EVERY = 10


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch."""

    channels: int
    batch_size: int


CONFIGS: dict[Preset, Config] = {
    "small": Config(channels=32, batch_size=64),
    "full": Config(channels=128, batch_size=256),
    "tiny": Config(channels=8, batch_size=32),
}


class Net(nn.Module):
    """Two convolution blocks and a hidden layer.

    Everything in it is smooth: at the kinks of relu and max pooling a difference of one bit between two
    executors grows into another training run (1e-2 after 200 steps; here 1e-6), which leaves nothing to
    compare.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        # A bias in front of batch norm has no effect, and its gradient is nothing but rounding errors.
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * channels)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(2 * channels * 2 * 2, 4 * channels)
        self.output = nn.Linear(4 * channels, 10)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the logits of the ten digits."""
        x = F.avg_pool2d(F.gelu(self.norm1(self.conv1(x_BCHW))), 2)
        x = F.avg_pool2d(F.gelu(self.norm2(self.conv2(x))), 2)
        x = F.gelu(self.hidden(self.dropout(x.flatten(1))))
        logits: torch.Tensor = self.output(self.dropout(x))
        return logits


class DigitsTraining:
    """Adam with a learning rate that falls each epoch; logs its loss every 10 steps."""

    def __init__(self, config: Config, device: torch.device) -> None:
        train, test = read_digits(device)
        self.test_images, self.test_labels = test.images.reshape(-1, 1, 8, 8), test.labels
        self.train_images, self.train_labels = train.images.reshape(-1, 1, 8, 8), train.labels

        self.batch_size = config.batch_size
        self.steps_per_epoch = len(train.labels) // config.batch_size
        self.model: nn.Module = Net(config.channels).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.optimizers = (self.optimizer,)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.85)
        self.logged: list[tuple[int, float]] = []
        self.steps = 0
        self.batches = self._shuffled_batches()

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        images, labels = next(self.batches)
        with tape():
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            if self.steps % LOG_EVERY == 0:
                self.logged.append((self.steps, loss.item()))
        self.steps += 1
        return loss

    def end_epoch(self) -> None:
        """Lower the learning rate."""
        self.schedule.step()

    def evaluate(self) -> float:
        """Return the share of test images that are classified correctly."""
        self.model.eval()
        with torch.no_grad():
            correct = self.model(self.test_images).argmax(1) == self.test_labels
        self.model.train()
        return float(correct.float().mean())

    def _shuffled_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            order = torch.randperm(len(self.train_images))
            for rows in order.split(self.batch_size)[: self.steps_per_epoch]:
                yield self.train_images[rows], self.train_labels[rows]


def make(seed: int, preset: Preset) -> DigitsTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return DigitsTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="digits",
    description="convolutional classifier (batch norm, dropout, Adam, schedule) of 1,797 handwritten digits",
    metric="test accuracy",
    make=make,
)
