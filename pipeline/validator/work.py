"""Everything that has to be done is done once, and each action is where it belongs.

Looks at actions one by one and at how often each appears, never at their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipeline.actions import Action, Compute, Kind, Message, Transfer, Wait, Weights
from pipeline.program import Layout, Program
from pipeline.validator.problems import Problem, problem


def work_problems(program: Program) -> list[Problem]:
    """Misplaced, repeated and missing actions."""
    problems = []
    for r, actions in enumerate(program.ranks):
        seen: set[Action] = set()
        for i, action in enumerate(actions):
            if reason := _misplaced(program.layout, r, action):
                problems.append(problem(program, r, i, reason))
            key = action._replace(version=0) if isinstance(action, Compute) else action
            if key in seen:
                problems.append(problem(program, r, i, "is here a second time"))
            seen.add(key)
    return problems + list(_missing(program))


def _misplaced(layout: Layout, rank: int, action: Action) -> str | None:
    if isinstance(action, Wait):
        return _misplaced(layout, rank, action.on)
    if isinstance(action, Message):
        return _misplaced_message(layout, rank, action)
    if action.stage >= len(layout.stages):
        return f"there is no stage {action.stage}"
    if isinstance(action, Weights):
        updates = layout.samples // layout.stages[action.stage].update
        if rank not in layout.stages[action.stage].ranks:
            return f"stage {action.stage} is not on this rank"
        if action.version > updates:
            return f"stage {action.stage} makes {updates} updates"
        return None
    if action.micro_batch >= layout.micro_batches(action.stage):
        return f"stage {action.stage} has {layout.micro_batches(action.stage)} micro-batches"
    owner = layout.owner(action.stage, action.micro_batch)
    if isinstance(action, Compute):
        return None if rank == owner else f"this micro-batch belongs to rank {owner}"
    return _misplaced_transfer(layout, rank, action, owner)


def _misplaced_transfer(layout: Layout, rank: int, action: Transfer, owner: int) -> str | None:
    if not 0 <= action.peer < layout.ranks or action.peer == rank:
        return f"rank {action.peer} is no other rank"
    holder = rank if action.kind in (Kind.EVICT, Kind.LOAD) else action.peer
    return None if holder == owner else f"this micro-batch belongs to rank {owner}"


def _misplaced_message(layout: Layout, rank: int, action: Message) -> str | None:
    edge = (action.target, action.source) if action.gradient else (action.source, action.target)
    if edge not in layout.edges:
        return f"no edge from stage {edge[0]} to stage {edge[1]}"
    if not 0 <= action.start < action.stop <= layout.samples:
        return f"there are no such samples; there are {layout.samples}"
    made = action.start // layout.stages[action.source].size
    used = action.start // layout.stages[action.target].size
    shared = layout.shared_samples(action.source, made, action.target, used)
    if shared != range(action.start, action.stop):
        return f"a message holds what two micro-batches share, here [{shared.start},{shared.stop})"
    ends = layout.owner(action.source, made), layout.owner(action.target, used)
    here, there = ends if action.kind is Kind.SEND else ends[::-1]
    if (rank, action.peer) != (here, there):
        return f"this message is between rank {ends[0]} and rank {ends[1]}"
    return None


def _missing(program: Program) -> Iterator[Problem]:
    layout = program.layout
    done = Counter(
        (a.kind, a.stage, a.micro_batch)
        for actions in program.ranks
        for a in actions
        if isinstance(a, Compute)
    )
    updates = {
        (r, a.stage, a.version)
        for r, actions in enumerate(program.ranks)
        for a in actions
        if isinstance(a, Weights) and a.kind is Kind.UPDATE
    }
    for s, stage in enumerate(layout.stages):
        for k in range(layout.micro_batches(s)):
            owner = layout.owner(s, k)
            end = len(program.ranks[owner])
            whole = done[Kind.BACKWARD, s, k]
            parts = done[Kind.BACKWARD_INPUT, s, k], done[Kind.BACKWARD_WEIGHT, s, k]
            if not done[Kind.FORWARD, s, k]:
                yield problem(program, owner, end, f"the forward pass F {s} {k} is missing")
            if (whole, *parts) not in ((1, 0, 0), (0, 1, 1)):
                yield problem(
                    program,
                    owner,
                    end,
                    f"the backward pass of micro-batch {k} of stage {s} must be one B, or one BI and one BW;"
                    f" it is {whole} B, {parts[0]} BI and {parts[1]} BW",
                )
        for r in stage.ranks:
            for version in range(1, layout.samples // stage.update + 1):
                if (r, s, version) not in updates:
                    yield problem(program, r, len(program.ranks[r]), f"UPDATE {s} w{version} is missing")
