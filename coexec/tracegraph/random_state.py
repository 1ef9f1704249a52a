"""The state of the CPU's default generator, seen and set by events.

The GraphRunner draws random numbers while Python runs ahead, so Python cannot ask the generator itself. These
functions stand for its methods: operations of our own do the same where they come in the order of draws, and
the state that Python gets is a tensor like any other.
"""

from __future__ import annotations

import torch

from coexec._native import core

Tensor = torch.Tensor


def rng_state() -> Tensor:
    """What `torch.get_rng_state()` returns: uint8 of shape (5056,)."""
    state: Tensor = torch.ops.coexec.rng_state.default()
    return state


def set_rng_state(state: Tensor) -> None:
    """Does what `torch.set_rng_state(state)` does."""
    torch.ops.coexec.set_rng_state.default(state)


def seed_rng(seed: Tensor) -> None:
    """Does what `torch.manual_seed(seed)` does to the CPU's generator; the seed is data, as a batch is."""
    torch.ops.coexec.seed_rng.default(seed)


_FUNCTIONS = (rng_state, set_rng_state, seed_rng)

#: The operations, in the order of draws: a compiler would not know of it.
OPERATIONS = {getattr(torch.ops.coexec, f.__name__) for f in _FUNCTIONS} if core else set()

#: What the generator's methods are in a block; nothing without the native module, which has the operations.
EVENTS = {"get_state": rng_state, "set_state": set_rng_state, "manual_seed": seed_rng} if core else {}

for _function in _FUNCTIONS:
    _function.__module__ = "torch.random"  # where a reader of a TraceGraph expects them
