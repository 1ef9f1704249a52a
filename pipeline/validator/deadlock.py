"""No ranks wait for each other in a circle.

Runs the program without time: each rank goes on until it waits for something that its peer has not started,
or for a replica that has not come to the same `REDUCE`. A transfer completes once both ends have started it,
so this holds for eager and for rendezvous sends alike.
"""

from __future__ import annotations

from pipeline.actions import Action, Kind, Message, Transfer, Wait, Weights, other_end
from pipeline.graph import find_cycle
from pipeline.program import Program
from pipeline.validator.problems import Problem, problem

Meeting = tuple[int, Message | Transfer | Weights]
"""What others wait for: a rank that has come to an action."""


def deadlock_problems(program: Program) -> list[Problem]:
    """The circle of ranks that wait for each other, if there is one.

    Args:
        program: A program in which nothing else is wrong: both ends of each message exist, and so do the
            `REDUCE`s of all replicas.
    """
    at = [0] * len(program.ranks)
    reached: set[Meeting] = set()
    waiting: dict[Meeting, list[int]] = {}
    running = list(range(len(at)))
    while running:
        r = running.pop()
        actions = program.ranks[r]
        while at[r] < len(actions):
            action = actions[at[r]]
            if isinstance(action, Message | Transfer | Weights):
                reached.add((r, action))
                running += waiting.pop((r, action), ())
            missing = next((m for m in _meetings(program, r, action) if m not in reached), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(r)
                break
            at[r] += 1
    blocked = {r: missing[0] for missing, ranks in waiting.items() for r in ranks}
    if not blocked:
        return []
    cycle = [r for r in find_cycle(blocked.items())[:-1] if isinstance(r, int)]
    steps = [f"rank {r}, index {at[r]} ({program.ranks[r][at[r]]})" for r in cycle]
    reason = f"deadlock, each waits for the next: {' -> '.join([*steps, steps[0]])}"
    return [problem(program, cycle[0], at[cycle[0]], reason)]


def _meetings(program: Program, rank: int, action: Action) -> list[Meeting]:
    """What must have been reached before a rank goes past an action."""
    if isinstance(action, Wait):
        return [(action.on.peer, other_end(action.on, rank))]
    if isinstance(action, Weights) and action.kind is Kind.REDUCE:
        return [(r, action) for r in program.layout.stages[action.stage].ranks]
    return []
