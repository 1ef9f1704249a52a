"""Adds up gradients over the replicas of a stage.

In:  the parameters of a stage on each rank that has it.
Out: the same sum in each parameter's `.grad`, on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipeline.program import Layout
from pipeline.runtime.channels import wait
from pipeline.runtime.place import Place


class Replicas:
    """The process groups of replicated stages."""

    def __init__(self, layout: Layout, place: Place, limit_s: float) -> None:
        """Make the groups; every rank has to do this at the same time."""
        self._limit_s = limit_s
        self._ranks = [stage.ranks for stage in layout.stages]
        self._groups = {
            ranks: place.new_group(ranks) for ranks in dict.fromkeys(self._ranks) if len(ranks) > 1
        }

    def reduce(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the replicas."""
        ranks = self._ranks[stage]
        group = self._groups.get(ranks)
        if group is not None:
            others = ", ".join(map(str, ranks))
            add_up(parameters, group, self._limit_s, f"one of the replicas on ranks {others}")


def add_up(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, limit_s: float, who: str) -> None:
    """Replace each gradient by its sum over a process group, all of one type in one go.

    A process without a gradient for a parameter adds zeros.

    Raises:
        RunError: `who` is gone, or did nothing for `limit_s` seconds.
    """
    learning = [p for p in parameters if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in learning):
        same = [p for p in learning if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in same])
        work = dist.all_reduce(flat, group=group, async_op=True)
        if work is not None:
            wait(work, limit_s, who)
        for p, total in zip(same, flat.split([p.numel() for p in same]), strict=True):
            if p.grad is None:
                p.grad = total.view_as(p).clone()
            else:
                p.grad.copy_(total.view_as(p))
