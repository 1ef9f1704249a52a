"""3D-ResNet50 (Hara et al., 2018): ResNet50 with three-dimensional convolutions over short videos."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.base import Made, Size, images, ready


class Bottleneck(nn.Module):
    """1, 3 and 1 wide convolutions in space and time, each normalised; the input is added."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = 4 * inner
        self.body = nn.Sequential(
            nn.Conv3d(before, inner, 1, bias=False),
            nn.BatchNorm3d(inner),
            nn.ReLU(),
            nn.Conv3d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm3d(inner),
            nn.ReLU(),
            nn.Conv3d(inner, after, 1, bias=False),
            nn.BatchNorm3d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv3d(before, after, 1, stride, bias=False), nn.BatchNorm3d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, before, frames, height, width), each of the three divided by the stride."""
        return torch.relu(self.body(x) + self.shortcut(x))


def make(size: Size, batch: int, seed: int) -> Made:
    """The classifier and videos."""
    torch.manual_seed(seed)
    depths, base, frames, side = ((3, 4, 6, 3), 64, 16, 112) if size == "full" else ((1, 1), 4, 4, 16)
    layers: list[nn.Module] = [
        nn.Conv3d(3, base, 7, (1, 2, 2), 3, bias=False),
        nn.BatchNorm3d(base),
        nn.ReLU(),
        nn.MaxPool3d(3, 2, 1),
    ]
    before = base
    for stage, depth in enumerate(depths):
        inner = base * 2**stage
        for block in range(depth):
            layers.append(Bottleneck(before, inner, 2 if stage and not block else 1))
            before = 4 * inner
    layers += [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(before, 400 if size == "full" else 10)]
    return ready(nn.Sequential(*layers), seed), (images((batch, 3, frames, side, side), seed),)
