"""NASNet-A, 4 @ 1056 (Zoph et al., 2018): cells of separable convolutions and pools that a search found."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.base import Made, Size, images, ready


class Separable(nn.Sequential):
    """Twice: rectify, depthwise convolution, 1 x 1 convolution, normalise; the first with the stride."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for first, step in ((before, stride), (after, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(first, first, kernel, step, kernel // 2, groups=first, bias=False),
                nn.Conv2d(first, after, 1, bias=False),
                nn.BatchNorm2d(after),
            ]
        super().__init__(*layers)


class Fit(nn.Sequential):
    """Rectify, 1 x 1 convolution, normalise: brings a tensor to a cell's channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after))


class Halve(nn.Module):
    """Half the height and width without losing every other pixel: two grids, one shifted by a pixel."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, after // 2, 1, bias=False)
        self.odd = nn.Conv2d(before, after - after // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, before, height, width) to (batch, after, height / 2, width / 2)."""
        x = torch.relu(x)
        shifted = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        grids = [self.even(x[:, :, ::2, ::2]), self.odd(shifted[:, :, ::2, ::2])]
        normed: torch.Tensor = self.norm(torch.cat(grids, 1))
        return normed


def average(stride: int = 1) -> nn.Module:
    """The average of 3 x 3 pixels."""
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


class Cell(nn.Module):
    """What both kinds of cell share: the two inputs brought to one size and width."""

    def __init__(self, previous: int, current: int, width: int, halved: bool) -> None:
        super().__init__()
        self.left = Halve(previous, width) if halved else Fit(previous, width)
        self.right = Fit(current, width)


class Normal(Cell):
    """Five sums; the result has six times the cell's width."""

    def __init__(self, previous: int, current: int, width: int, halved: bool) -> None:
        super().__init__(previous, current, width, halved)
        self.a = nn.ModuleList([Separable(width, width, 5), Separable(width, width, 3)])
        self.b = nn.ModuleList([Separable(width, width, 5), Separable(width, width, 3)])
        self.e = Separable(width, width, 3)
        self.pool = average()

    def forward(self, previous: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """From the results of the two cells before."""
        left, right = self.left(previous), self.right(current)
        sums = [
            self.a[0](right) + self.a[1](left),
            self.b[0](left) + self.b[1](left),
            self.pool(right) + left,
            self.pool(left) + self.pool(left),
            self.e(right) + right,
        ]
        return torch.cat([left, *sums], 1)


class Reduction(Cell):
    """Half the height and width; the result has four times the cell's width."""

    def __init__(self, previous: int, current: int, width: int, halved: bool) -> None:
        super().__init__(previous, current, width, halved)
        self.a = nn.ModuleList([Separable(width, width, 5, 2), Separable(width, width, 7, 2)])
        self.b = Separable(width, width, 7, 2)
        self.c = Separable(width, width, 5, 2)
        self.e = Separable(width, width, 3)
        self.largest = nn.MaxPool2d(3, 2, 1)
        self.halving, self.pool = average(2), average()

    def forward(self, previous: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """From the results of the two cells before."""
        left, right = self.left(previous), self.right(current)
        first = self.a[0](right) + self.a[1](left)
        second = self.largest(right) + self.b(left)
        third = self.halving(right) + self.c(left)
        return torch.cat([second, third, self.pool(first) + second, self.e(first) + self.largest(right)], 1)


class NASNet(nn.Module):
    """A convolution, two reductions, three stages of normal cells with a reduction between each two."""

    def __init__(self, cells: int, width: int, stem: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 2, bias=False), nn.BatchNorm2d(stem))
        self.cells = nn.ModuleList()
        previous, current, halved = stem, stem, False
        plan: list[tuple[type[Cell], int]] = [(Reduction, width // 4), (Reduction, width // 2)]
        for stage in range(3):
            if stage:
                plan.append((Reduction, width * 2**stage))
            plan += [(Normal, width * 2**stage)] * cells
        for kind, inner in plan:
            self.cells.append(kind(previous, current, inner, halved))
            previous, current = current, inner * (6 if kind is Normal else 4)
            halved = kind is Reduction
        self.head = nn.Sequential(
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(current, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From images to scores."""
        current = self.stem(x)
        previous = current
        for cell in self.cells:
            previous, current = current, cell(previous, current)
        scores: torch.Tensor = self.head(current)
        return scores


def make(size: Size, batch: int, seed: int) -> Made:
    """The classifier and images."""
    torch.manual_seed(seed)
    full = size == "full"
    model = NASNet(4, 44, 32, 1000) if full else NASNet(1, 8, 4, 10)
    side = 224 if full else 32
    return ready(model, seed), (images((batch, 3, side, side), seed),)
