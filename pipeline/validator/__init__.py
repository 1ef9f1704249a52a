"""Check a program before anything runs it.

In:  a program; optionally the costs of its stages and the memory of a rank.
Out: `check` gives a list of `Problem`s, empty for a program that is right; `validate` raises them.

Each module holds one kind of rule: `work` (everything is done once, where it belongs), `order` (nothing is
used before it is there), `weights` (versions), `messages` (both ends match), `deadlock` (no ranks wait for
each other), `memory` (no rank holds too much). Start at `work.work_problems`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import ValidationError
from pipeline.plans import StageCost
from pipeline.program import Program
from pipeline.validator.deadlock import deadlock_problems
from pipeline.validator.memory import memory_problems
from pipeline.validator.messages import Matching, message_problems
from pipeline.validator.order import order_problems
from pipeline.validator.problems import Problem
from pipeline.validator.weights import weight_problems
from pipeline.validator.work import work_problems

__all__ = ["Matching", "Problem", "check", "validate"]


def check(
    program: Program,
    *,
    costs: Sequence[StageCost] | None = None,
    memory_bytes: float | None = None,
    matching: Matching = "fifo",
) -> list[Problem]:
    """Everything that is wrong with a program.

    Args:
        program: The program.
        costs: Cost of each stage, for one of its micro-batches; needed with `memory_bytes`.
        memory_bytes: What a rank may hold.
        matching: How messages find each other: `tags`, as gloo, in any order; `fifo`, as NCCL, in the order
            in which both ends start them, for each ordered pair of ranks and for messages and transfers
            apart. What is right in order is also right by tags.

    Returns:
        The problems. Deadlock is looked for only in a program in which nothing else is wrong, since a rank
        that waits for a message that is never sent is better told so.
    """
    problems = work_problems(program)
    if problems:  # the other rules take for granted that each action can belong where it is
        return problems
    problems = [
        *order_problems(program),
        *weight_problems(program),
        *message_problems(program, matching),
    ]
    if not problems:
        problems += deadlock_problems(program)
    if costs is not None and memory_bytes is not None:
        problems += memory_problems(program, costs, memory_bytes)
    return problems


def validate(
    program: Program,
    *,
    costs: Sequence[StageCost] | None = None,
    memory_bytes: float | None = None,
    matching: Matching = "fifo",
) -> None:
    """As `check`.

    Raises:
        ValidationError: With one problem a line.
    """
    problems = check(program, costs=costs, memory_bytes=memory_bytes, matching=matching)
    if problems:
        raise ValidationError("\n".join(map(str, problems)))
