"""A model that can be cut into stages, with what it takes to train it.

In:  the name of a function that makes one, such as `package.module:function`.
Out: a `Trainable`: layers in a row, a loss, batches, an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from pipeline.errors import PlanError

SHORT = {"charlm": "pipeline.charlm:make", "sleep": "pipeline.sleeping:make"}
"""Functions that have a short name."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """What `run` trains.

    Attributes:
        layers: Each takes what the one before gives; the first one takes a batch's inputs.
        loss: Mean loss of the last layer's output against a batch's targets.
        batch: Inputs and targets of a step, for as many samples; the same whenever it is asked.
        optimizer: An optimizer of some parameters. It must treat each on its own: what looks at all of them,
            such as clipping by their common norm, would see those of one stage.
    """

    layers: Sequence[nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class WithLoss(nn.Module):
    """The last stage: its layers, and the loss against targets."""

    def __init__(self, layers: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = layers
        self.loss = loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The loss; the last input is the targets."""
        *activations, targets = inputs
        return self.loss(self.layers(*activations), targets)


def make_trainable(name: str, seed: int, **options: Any) -> Trainable:
    """The model that a name stands for, with weights that depend on the seed alone.

    Args:
        name: A short name, or `package.module:function`.
        seed: Of the weights.
        options: Keyword arguments of the function.

    Raises:
        PlanError: There is no such function, or it has no such options.
    """
    module, _, function = SHORT.get(name, name).partition(":")
    if not function:
        raise PlanError(f"model {name!r}: give package.module:function, or one of {', '.join(SHORT)}.")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"model {name!r} can't be loaded: {error}.") from error
    try:
        signature = inspect.signature(make)
        signature.bind(**options)
    except TypeError as error:
        raise PlanError(f"model {name!r}: {error}; it takes {signature}.") from error
    except ValueError as error:
        raise PlanError(f"model {name!r} is no function with a signature: {error}.") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make(**options)
    if not isinstance(made, Trainable):
        raise PlanError(f"model {name!r} gave a {type(made).__name__}; it must give a pipeline Trainable.")
    return made


def cut(trainable: Trainable, lengths: Sequence[int]) -> list[nn.Module]:
    """The stages: so many layers each, the last one with the loss."""
    layers = list(trainable.layers)
    if sum(lengths) != len(layers) or min(lengths) < 1:
        raise PlanError(f"{len(layers)} layers can't be cut into stages of {list(lengths)}.")
    stages: list[nn.Module] = []
    for n in lengths:
        stages.append(nn.Sequential(*layers[:n]))
        layers = layers[n:]
    stages[-1] = WithLoss(stages[-1], trainable.loss)
    return stages


def even_lengths(layers: int, stages: int) -> tuple[int, ...]:
    """As equal as possible, the longer ones in the middle: the ends also embed and compute the loss."""
    if stages > layers:
        raise PlanError(f"{layers} layers can't be cut into {stages} stages.")
    short, longer = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda s: abs(2 * s - stages + 1))
    more = set(middle_first[:longer])
    return tuple(short + (s in more) for s in range(stages))
