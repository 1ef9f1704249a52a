"""Messages between ranks on torch.distributed's public point-to-point operations.

In:  a message or transfer that a rank starts, and the tensors that it sends or receives into.
Out: a `Pending`, to be waited for with a time limit.

Both ends know each message by its two stages and range of samples, or by stage and micro-batch. Where the
backend matches messages by tag (gloo), each has a tag of its own, made from its place in the program, and all
share one process group. Where it matches them in order (NCCL), there is one process group for each direction
between two ranks, and another one for transfers, which go at times of their own. Several tensors of one
message follow each other in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.actions import GIVING, Message, Transfer, other_end
from pipeline.program import Program
from pipeline.runtime.errors import RunError
from pipeline.runtime.place import Place
from pipeline.validator.messages import Channel, Matching, channel_of


@dataclass(slots=True)
class Pending:
    """Something that has been started; its tensors are kept until it has completed."""

    action: Message | Transfer
    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    limit_s: float

    def wait(self) -> None:
        """Wait until it has completed.

        Raises:
            RunError: The peer is gone, or did nothing for `limit_s` seconds.
        """
        for work in self.works:
            wait(work, self.limit_s, f"rank {self.action.peer}")


def wait(work: dist.Work, limit_s: float, who: str) -> None:
    """Wait for one operation with others.

    Raises:
        RunError: They are gone, or did nothing for `limit_s` seconds.
    """
    try:
        if not work.wait(timedelta(seconds=limit_s)):
            raise RunError(f"{who} gave up.")
    except RuntimeError as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise RunError(
                f"{who} did not answer within {limit_s:g} s. It hangs, or its program differs."
            ) from error
        raise RunError(f"{who} is gone ({text}).") from error


class Channels:
    """What one rank sends and receives through."""

    def __init__(self, program: Program, place: Place, *, matching: Matching, limit_s: float) -> None:
        """Make the process groups that a program needs; every rank has to do this at the same time.

        Args:
            program: The program, the same on every rank.
            place: Which process of which rank this is.
            matching: How the backend matches messages.
            limit_s: Seconds that a wait may take.
        """
        self._place = place
        self._limit_s = limit_s
        self._tags: dict[tuple[int, Message | Transfer], int] = {}
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        if matching == "tags":
            self._tags = _tags(program)
            return
        for channel in _channels(program):
            ends = channel[0], channel[1]
            group = place.new_group(ends)
            if place.rank in ends and group is not None:
                self._groups[channel] = group

    def start(self, action: Message | Transfer, tensors: Sequence[torch.Tensor]) -> Pending:
        """Start sending the tensors, or receiving into them; they must be contiguous."""
        gives = action.kind in GIVING
        tag = self._tags.get(
            (self._place.rank, action) if gives else (action.peer, other_end(action, self._place.rank)), 0
        )
        group = self._groups.get(channel_of(action, self._place.rank))
        peer = self._place.process(action.peer)
        works = []
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            start = dist.isend if gives else dist.irecv
            work = start(tensor, peer, group, tag)
            if work is None:
                raise RunError(f"rank {self._place.rank} is not part of the process group for {action}.")
            works.append(work)
        return Pending(action, tuple(tensors), tuple(works), self._limit_s)


def _tags(program: Program) -> dict[tuple[int, Message | Transfer], int]:
    """A number for each giving end, by its rank."""
    tags: dict[tuple[int, Message | Transfer], int] = {}
    for r, actions in enumerate(program.ranks):
        for action in actions:
            if isinstance(action, Message | Transfer) and action.kind in GIVING:
                tags[r, action] = len(tags) + 1
    return tags


def _channels(program: Program) -> list[Channel]:
    return sorted(
        {
            channel_of(action, r)
            for r, actions in enumerate(program.ranks)
            for action in actions
            if isinstance(action, Message | Transfer)
        }
    )
