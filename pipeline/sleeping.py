"""Stages that sleep instead of computing: for measuring schedules and not machines.

In:  how long each pass of a layer takes, and how large its output is.
Out: a `Trainable`. Ranks that sleep don't compete for cores, so that even a small machine shows the overlap
     that a schedule has on many.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pipeline.trainable import Trainable


class _Pass(torch.autograd.Function):
    """Hands a tensor on, asleep for a while in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None


class Sleep(nn.Module):
    """Adds a number to its input; half of its backward pass is for the input, half for the number."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, after a while."""
        time.sleep(self.forward_s)
        number = _Pass.apply(self.number, self.backward_s / 2)  # type: ignore[no-untyped-call] # torch has none
        y: torch.Tensor = _Pass.apply(x, self.backward_s / 2) + number  # type: ignore[no-untyped-call] # as above
        return y


def make(
    *, layers: int = 4, forward_ms: float = 20.0, backward_ms: float = 40.0, sample_bytes: int = 1024
) -> Trainable:
    """Layers that sleep.

    Args:
        layers: How many.
        forward_ms: Time of one's forward pass, milliseconds, whatever the number of samples.
        backward_ms: Time of its backward pass.
        sample_bytes: What one gives for each sample.
    """

    def batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(samples, sample_bytes // 4), torch.zeros(samples)

    modules = [Sleep(forward_ms / 1e3, backward_ms / 1e3) for _ in range(layers)]
    return Trainable(modules, _loss, batch, _optimizer)


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - targets).square().mean()


def _optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)
