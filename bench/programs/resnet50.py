"""ResNet-50 on rotated photographs.

Source: He et al., "Deep Residual Learning for Image Recognition" (2016), Table 1 and Figure 5; the stride is
in the 3 x 3 convolution. A narrow one has fewer channels in every layer, and all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.data.photos import CLASSES, read_photos
from bench.program import Preset, Program, TapeFactory, device_of
from bench.randomness import seed_everything
from bench.training import ClassifierTraining

EXPANSION = 4


@dataclass(frozen=True, slots=True)
class Config:
    """Size of the model, of the images and of a batch."""

    width: int
    """Channels behind the first convolution: 64 in the paper."""
    layers: tuple[int, int, int, int]
    image_size: int
    shrink: int
    batch_size: int
    images: int


CONFIGS: dict[Preset, Config] = {
    "small": Config(8, (3, 4, 6, 3), image_size=48, shrink=4, batch_size=16, images=800),
    "full": Config(64, (3, 4, 6, 3), image_size=224, shrink=1, batch_size=64, images=3200),
    "tiny": Config(4, (1, 1, 1, 1), image_size=32, shrink=3, batch_size=8, images=400),
}


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, EXPANSION * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(EXPANSION * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != EXPANSION * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, EXPANSION * width, 1, stride=stride, bias=False),
                nn.BatchNorm2d(EXPANSION * width),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += identity
        result: torch.Tensor = self.relu(y)
        return result


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, and a linear classifier."""

    def __init__(self, width: int, layers: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages, channels = [], width
        for stage, blocks in enumerate(layers):
            inner = width * 2**stage
            for block in range(blocks):
                stages.append(Bottleneck(channels, inner, stride=2 if block == 0 and stage > 0 else 1))
                channels = EXPANSION * inner
        self.stages = nn.Sequential(*stages)
        self.output = nn.Linear(channels, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)  # each block begins as the identity

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the photographs' orientations."""
        features = self.stages(self.stem(images))
        logits: torch.Tensor = self.output(torch.flatten(F.adaptive_avg_pool2d(features, 1), 1))
        return logits


class ResNetTraining(ClassifierTraining):
    """SGD with momentum and weight decay, and a learning rate that falls along a cosine, step by step."""

    def __init__(self, config: Config, device: torch.device) -> None:
        train = read_photos(config.image_size, config.images, shrink=config.shrink, seed=0).to(device)
        test = read_photos(config.image_size, config.images // 4, shrink=config.shrink, seed=1).to(device)
        model = ResNet(config.width, config.layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2000)
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
            self.schedule.step()
            self.log(loss)
        return loss


def make(seed: int, preset: Preset) -> ResNetTraining:
    """Seed the default generators and build a run."""
    seed_everything(seed)
    return ResNetTraining(CONFIGS[preset], device_of(preset))


PROGRAM = Program(
    name="resnet50",
    description="ResNet-50 (batch norm, in-place activations, cosine schedule) on rotated photographs",
    metric="test accuracy",
    make=make,
)
