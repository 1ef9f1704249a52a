"""The default random generators of torch (on every device), NumPy and Python, as one value."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every default generator."""

    torch_state: torch.Tensor
    cuda_states: list[torch.Tensor]
    numpy_state: Any
    python_state: Any

    @staticmethod
    def capture() -> RandomState:
        """Return the present state."""
        return RandomState(
            torch.get_rng_state(), torch.cuda.get_rng_state_all(), np.random.get_state(), random.getstate()
        )

    def restore(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.torch_state)
        torch.cuda.set_rng_state_all(self.cuda_states)
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)

    def matches(self, other: RandomState) -> bool:
        """Return whether both would go on with the same random numbers."""
        return (
            torch.equal(self.torch_state, other.torch_state)
            and all(map(torch.equal, self.cuda_states, other.cuda_states))
            and all(np.array_equal(a, b) for a, b in zip(self.numpy_state, other.numpy_state, strict=True))
            and self.python_state == other.python_state
        )


def seed_everything(seed: int) -> None:
    """Seed the default generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
