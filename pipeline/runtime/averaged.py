"""DistributedDataParallel inside a stage: gradients are averaged once for each update.

By itself, DDP averages in the backward pass that follows a forward pass. In a pipeline several forward passes
come before one backward pass, and later backward passes would average nothing. So DDP is told not to (its
public `no_sync`), and the averages are taken here, before replicas add up theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.runtime.replicas import add_up


class Averaged:
    """The parts of one stage that DDP wraps."""

    def __init__(self, module: nn.Module, limit_s: float) -> None:
        self._limit_s = limit_s
        self._parts = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Passes inside leave gradients as they are."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.no_sync())
            yield

    def average(self) -> None:
        """Replace each gradient by its mean over the processes of its part."""
        for part in self._parts:
            group: dist.ProcessGroup = part.process_group
            parameters = [p for p in part.parameters() if p.requires_grad]
            add_up(parameters, group, self._limit_s, "a process that DDP joins with this one")
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(group.size())
