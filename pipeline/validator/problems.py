"""What is wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.program import Program


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        rank: The rank whose program it is in.
        index: The position in it, counted from 0; its length when something is missing at the end.
        action: What is written there.
        reason: What is wrong with that.
    """

    rank: int
    index: int
    action: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}, index {self.index} ({self.action}): {self.reason}"


def problem(program: Program, rank: int, index: int, reason: str) -> Problem:
    """A problem with the action at an index of a rank."""
    actions = program.ranks[rank]
    action = str(actions[index]) if index < len(actions) else "end"
    return Problem(rank, index, action, reason)
