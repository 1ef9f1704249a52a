"""What a workload is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Size = Literal["full", "tiny"]
"""`full` is the published model; `tiny` has its operations in small, for tests."""
Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with inputs."""

    name: str
    description: str
    make: Callable[[Size, int, int], Made]
    """From size, batch size and seed to the module, in evaluation mode, and its inputs."""


def ready(module: nn.Module, seed: int) -> nn.Module:
    """The module in evaluation mode, statistics of its batch normalisations drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0.0, 0.1, generator=generator)
            part.running_var.uniform_(0.5, 1.5, generator=generator)
    return module.eval().requires_grad_(False)


def images(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normally distributed values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
