"""Random numbers that depend on what is computed and not on when.

In:  a seed, and which micro-batch of which stage in which run.
Out: generators in a state that is theirs alone, while the pass runs; put back afterwards.

So dropout draws the same mask under every schedule, again when a forward pass is recomputed, and in a single
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def seed_of(seed: int, run: int, stage: int, micro_batch: int) -> int:
    """A seed for one micro-batch of one stage in one run of the program."""
    key = f"{seed} {run} {stage} {micro_batch}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Default generators of the CPU and of `device` start from a seed inside, and go on as before after."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(cuda[0]):
                torch.cuda.manual_seed(seed)
        yield
