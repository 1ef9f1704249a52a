"""The generator of DCGAN (Radford et al., 2016): five transposed convolutions from noise to an image."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from bench.workloads.base import Made, Size, images, ready


def make(size: Size, batch: int, seed: int) -> Made:
    """The generator and noise of 100 numbers an image."""
    torch.manual_seed(seed)
    width = 64 if size == "full" else 4
    widths = [100, 8 * width, 4 * width, 2 * width, width]
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        stride, padding = (1, 0) if number == 0 else (2, 1)
        layers += [
            nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    layers += [nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
    return ready(nn.Sequential(*layers), seed), (images((batch, 100, 1, 1), seed),)
