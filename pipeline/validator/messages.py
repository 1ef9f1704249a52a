"""Both ends of every message and transfer exist, and where they match in order, are in the same order."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from pipeline.actions import GIVING, Action, Message, Transfer, other_end
from pipeline.program import Program
from pipeline.validator.problems import Problem, problem

Matching = Literal["tags", "fifo"]

Channel = tuple[int, int, str]
"""From rank, to rank, and what: messages between stages and transfers of saved activations are kept apart."""


def channel_of(action: Message | Transfer, rank: int) -> Channel:
    """Where it goes along."""
    ends = (rank, action.peer) if action.kind in GIVING else (action.peer, rank)
    return (*ends, "messages" if isinstance(action, Message) else "transfers")


def message_problems(program: Program, matching: Matching) -> list[Problem]:
    """Ends without the other, and ends out of order."""
    started: list[dict[Message | Transfer, int]] = [
        {a: i for i, a in enumerate(actions) if isinstance(a, Message | Transfer)}
        for actions in program.ranks
    ]
    problems = []
    for r, actions in enumerate(started):
        for action, i in actions.items():
            wanted = other_end(action, r)
            if wanted not in started[action.peer]:
                reason = f"rank {action.peer} never starts {wanted}"
                problems.append(problem(program, r, i, reason))
    if problems or matching == "tags":
        return problems
    return _misordered(program)


def _misordered(program: Program) -> list[Problem]:
    giving: dict[Channel, list[Action]] = defaultdict(list)
    taking: dict[Channel, list[tuple[int, Action]]] = defaultdict(list)
    for r, actions in enumerate(program.ranks):
        for i, action in enumerate(actions):
            if isinstance(action, Message | Transfer):
                if action.kind in GIVING:
                    giving[channel_of(action, r)].append(other_end(action, r))
                else:
                    taking[channel_of(action, r)].append((i, action))
    problems = []
    for channel, ends in taking.items():
        for (i, action), sent in zip(ends, giving[channel], strict=True):
            if action != sent:
                reason = f"rank {channel[0]} gives {sent} first, and ends match in order"
                problems.append(problem(program, channel[1], i, reason))
                break
    return problems
