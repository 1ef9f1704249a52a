"""A residual classifier of handwritten digits with DropBlock, whose probability falls as it trains.

Its trait: the model keeps `keep_prob` in an attribute, and every step changes it.

Source: Ghiasi et al., "DropBlock: A regularization method for convolutional networks" (2018), Algorithm 1 and
section 3.1 (scheduled).
Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.digits import read_digits
from bench.data.labelled import LabelledImages
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import ClassifierTraining

IMAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model and of a batch, and how DropBlock ends up."""

    channels: int
    blocks: int
    batch_size: int
    block_size: int = 3
    keep_prob: float = 0.9
    steps_to_keep_prob: int = 100


CONFIGS: dict[Preset, Config] = {
    "small": Config(channels=16, blocks=3, batch_size=32),
    "full": Config(channels=128, blocks=12, batch_size=256),
    "tiny": Config(channels=4, blocks=2, batch_size=16),
}


class DropBlock(nn.Module):
    """Drops squares of features; less and less is kept until `keep_prob` reaches its target."""

    def __init__(self, block_size: int, target: float, steps: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.target = target
        self.decay = (1.0 - target) / steps
        self.keep_prob = 1.0

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the features, without the dropped squares and scaled up for them."""
        if not self.training or self.keep_prob == 1.0:
            return x_BCHW
        B, C, H, W = x_BCHW.shape
        size = self.block_size
        centres = (H - size + 1) * (W - size + 1)
        gamma = (1.0 - self.keep_prob) / size**2 * (H * W) / centres
        seeds = torch.rand(B, C, H - size + 1, W - size + 1, device=x_BCHW.device) < gamma
        around = F.pad(seeds.float(), [size // 2] * 4)
        mask = 1.0 - F.max_pool2d(around, size, stride=1, padding=size // 2)
        return x_BCHW * mask * (mask.numel() / mask.sum())

    def lower(self) -> None:
        """Take one step towards the target."""
        self.keep_prob = max(self.target, self.keep_prob - self.decay)


class Block(nn.Module):
    """Two convolutions around a residual connection, with DropBlock behind each."""

    def __init__(self, channels: int, dropblock: DropBlock) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.dropblock = dropblock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same shape."""
        y = self.dropblock(F.relu(self.norm1(self.conv1(x))))
        y = self.dropblock(self.norm2(self.conv2(y)))
        return F.relu(x + y)


class Net(nn.Module):
    """Residual blocks at one resolution and a linear classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropblock = DropBlock(config.block_size, config.keep_prob, config.steps_to_keep_prob)
        self.stem = nn.Conv2d(1, config.channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(config.channels, self.dropblock) for _ in range(config.blocks)))
        self.output = nn.Linear(config.channels, 10)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the logits of the ten digits."""
        features = self.blocks(F.relu(self.stem(images_BCHW)))
        logits: torch.Tensor = self.output(features.mean((2, 3)))
        return logits


class DropBlockTraining(ClassifierTraining):
    """SGD with momentum; `keep_prob` falls after each step."""

    model: Net

    def __init__(self, config: Config, device: torch.device) -> None:
        train, test = (_enlarged(digits) for digits in read_digits(device))
        model = Net(config).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        super().__init__(model, optimizer, train=train, test=test, batch_size=config.batch_size)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        images, labels = self.next_batch()
        [optimizer] = self.optimizers
        with tape():
            loss = F.cross_entropy(self.model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.model.dropblock.lower()
            self.log(loss)
        return loss


def _enlarged(digits: LabelledImages) -> LabelledImages:
    images = F.interpolate(digits.images.reshape(-1, 1, 8, 8), size=IMAGE_SIZE, mode="bilinear")
    return LabelledImages(images, digits.labels)


def make(seed: int, preset: Preset) -> DropBlockTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return DropBlockTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="dropblock",
    description="residual network with DropBlock, whose keep_prob falls with every step, on digits",
    metric="test accuracy",
    make=make,
)
