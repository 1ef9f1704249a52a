"""ResNeXt50, 32 x 4d (Xie et al., 2017): ResNet50 with 32 groups in its 3 x 3 convolutions."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.base import Made, Size, images, ready


class Bottleneck(nn.Module):
    """1 x 1, grouped 3 x 3, 1 x 1 convolution, each normalised; the input is added."""

    def __init__(self, before: int, inner: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, before, height, width) to (batch, after, height / stride, width / stride)."""
        return torch.relu(self.body(x) + self.shortcut(x))


def make(size: Size, batch: int, seed: int) -> Made:
    """The classifier and images."""
    torch.manual_seed(seed)
    depths, base, groups, side = ((3, 4, 6, 3), 64, 32, 224) if size == "full" else ((1, 1), 8, 4, 32)
    layers: list[nn.Module] = [
        nn.Conv2d(3, base, 7, 2, 3, bias=False),
        nn.BatchNorm2d(base),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = base
    for stage, depth in enumerate(depths):
        inner = 2 * base * 2**stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(before, inner, 2 * inner, stride, groups))
            before = 2 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000 if size == "full" else 10)]
    return ready(nn.Sequential(*layers), seed), (images((batch, 3, side, side), seed),)
