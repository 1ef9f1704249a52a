"""Which process is which: a rank may be several processes that act as one.

In:  how many processes a rank has.
Out: the rank of this process, its place in it, and the processes that it exchanges messages with.

The processes of a rank are numbered one after the other. Each runs the rank's program and talks to those that
have the same place at other ranks; what they do among themselves (tensor parallelism, sharded parameters) is
the business of the stage's module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Place:
    """This process.

    Attributes:
        rank: Its rank in the program.
        member: Its number among the processes of that rank.
        members: How many these are.
    """

    rank: int
    member: int
    members: int

    def process(self, rank: int) -> int:
        """The process of another rank that this one talks to."""
        return rank * self.members + self.member

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The process group of this process and its counterparts at some ranks; all have to ask for it."""
        own = None
        for member in range(self.members):
            group = dist.new_group([rank * self.members + member for rank in ranks])
            if member == self.member and isinstance(group, dist.ProcessGroup):
                own = group
        return own


def this_process(members: int) -> Place:
    """Where this process is, if each rank has so many."""
    rank, member = divmod(dist.get_rank(), members)
    return Place(rank, member, members)
