"""How a program is run, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.validator import Matching


@dataclass(frozen=True, slots=True)
class Options:
    """How a program is run.

    Attributes:
        limit_s: Seconds that a rank waits for another one before it gives up.
        seed: Of all random numbers that stages draw.
        matching: How the backend matches messages; found out from it when left out.
        check: Whether to validate the program first.
        members: Processes that act as one rank; see `pipeline.runtime.place`.
    """

    limit_s: float = 60.0
    seed: int = 0
    matching: Matching | None = None
    check: bool = True
    members: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a program gives on one rank.

    Attributes:
        losses: By stage and micro-batch, those that were computed here.
        held_bytes: Bytes held while each action ran, and one more entry for the end.
    """

    losses: Mapping[tuple[int, int], torch.Tensor]
    held_bytes: tuple[int, ...]
