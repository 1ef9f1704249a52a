"""What the PythonRunner remembers of an iteration, so that it can be run again eagerly."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from coexec.tracegraph.exposed import Exposure
from coexec.tracegraph.graph import Node
from coexec.tracegraph.trace import Number, Produced

Token = Produced | torch.Tensor | None  # a placeholder by its binding, or a tensor from outside


@dataclass(slots=True)
class EventRecord:
    """A matched event, with what is needed to run it again eagerly."""

    node: Node
    key: Hashable
    ambient: Hashable
    tokens: Sequence[Token]
    numbers: Sequence[Number]
    location: int
    exposure: Exposure | None = None


@dataclass(slots=True)
class FlagRecord:
    """A change of an external tensor's `requires_grad`, which was made at once."""

    tensor: torch.Tensor
    before: bool
    after: bool


@dataclass(slots=True)
class GradRecord:
    """An assignment to a `.grad`."""

    leaf: Token
    value: Token
