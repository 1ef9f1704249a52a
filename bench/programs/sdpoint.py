"""A residual classifier that is downsampled at a random point in each step (SDPoint), on rotated photographs.

Its trait: the program puts the point and the ratio into attributes of the model, and the shapes of everything
behind the point follow from them.

Source: Kuen et al., "Stochastic Downsampling for Cost-Adjustable Inference and Improved Regularization in
Convolutional Networks" (2018), section 3.
Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.photos import CLASSES, read_photos
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import ClassifierTraining

RATIOS = (0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model, of the images and of a batch."""

    widths: tuple[int, ...]
    image_size: int
    shrink: int
    batch_size: int
    images: int


CONFIGS: dict[Preset, Config] = {
    "small": Config(widths=(16, 24, 32, 48), image_size=32, shrink=5, batch_size=32, images=800),
    "full": Config(widths=(64, 128, 256, 512), image_size=192, shrink=1, batch_size=64, images=3200),
    "tiny": Config(widths=(4, 8), image_size=16, shrink=6, batch_size=8, images=400),
}


class Block(nn.Module):
    """Two convolutions around a residual connection; the first may halve the resolution."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class Net(nn.Module):
    """Residual blocks; `point` says behind which of them the features are made smaller, by `ratio`."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList()
        for i, width in enumerate(widths):
            self.blocks.append(Block(widths[max(i - 1, 0)], width, stride=1 if i == 0 else 2))
        self.output = nn.Linear(widths[-1], CLASSES)
        self.point: int | None = None
        self.ratio = 1.0

    def choose_point(self) -> None:
        """Choose at random where to downsample the next batch: nowhere, or behind one of the blocks."""
        self.point = random.choice([None, *range(len(self.blocks))])
        self.ratio = random.choice(RATIOS)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the logits of the photographs' orientations."""
        x = F.relu(self.stem(images_BCHW))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.training and i == self.point:
                x = F.interpolate(x, scale_factor=self.ratio, mode="bilinear", align_corners=False)
        logits: torch.Tensor = self.output(x.mean((2, 3)))
        return logits


class SDPointTraining(ClassifierTraining):
    """SGD with momentum; every step has its own point."""

    model: Net

    def __init__(self, config: Config, device: torch.device) -> None:
        train = read_photos(config.image_size, config.images, shrink=config.shrink, seed=0).to(device)
        test = read_photos(config.image_size, config.images // 4, shrink=config.shrink, seed=1).to(device)
        model = Net(config.widths).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        super().__init__(model, optimizer, train=train, test=test, batch_size=config.batch_size)

    def step(self, tape: TapeFactory) -> torch.Tensor:
        """Train on the next batch inside `tape()` and return its loss."""
        images, labels = self.next_batch()
        [optimizer] = self.optimizers
        with tape():
            self.model.choose_point()
            loss = F.cross_entropy(self.model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.log(loss)
        return loss


def make(seed: int, preset: Preset) -> SDPointTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return SDPointTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="sdpoint",
    description="residual network downsampled at a random point in each step, on rotated photographs",
    metric="test accuracy",
    make=make,
)
