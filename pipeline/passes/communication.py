"""Add the messages that a program of computation implies.

In:  a program whose ranks compute in an order that can be kept.
Out: the same with `SEND` after each pass whose result others use, and `RECV` and `WAIT` before each pass that
     uses it.

A send starts as soon as its data exist. A receive starts one computation before the one that waits for it, so
that the transfer runs beside that; earlier where several replicas send to one, so that each has one on its
way. Between two ranks, receives start in the order of the sends: programs are right both where messages find
each other by tag and where they match in order.
"""

from __future__ import annotations

from collections import defaultdict, deque

from pipeline.actions import Action, Compute, Kind, Message, Wait, other_end
from pipeline.dependencies import inputs_of, result_of
from pipeline.program import Layout, Program, with_ranks


def add_communication(program: Program) -> Program:
    """Add sends, receives and waits; the order of everything else stays."""
    layout = program.layout
    sent = [[_sends(layout, a, r) for a in actions] for r, actions in enumerate(program.ranks)]
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for r, per_action in enumerate(sent):
        for send in (send for sends in per_action for send in sends):
            channels[r, send.peer].append(other_end(send, r))
    ranks = []
    for r, actions in enumerate(program.ranks):
        posts, waits = _receives(layout, actions, r, channels)
        out: list[Action] = []
        for i, action in enumerate(actions):
            out += posts.get(i, ())
            out += (Wait(message) for message in waits.get(i, ()))
            out.append(action)
            out += sent[r][i]
        ranks.append(out)
    return with_ranks(program, ranks)


def _sends(layout: Layout, action: Action, rank: int) -> list[Message]:
    if not isinstance(action, Compute) or (made := result_of(action)) is None:
        return []
    stage, k = action.stage, action.micro_batch
    sends = []
    for target in layout.predecessors[stage] if made.gradient else layout.successors[stage]:
        for j in layout.overlapping(stage, k, target):
            if (peer := layout.owner(target, j)) != rank:
                samples = layout.shared_samples(stage, k, target, j)
                sends.append(
                    Message(Kind.SEND, made.gradient, stage, target, samples.start, samples.stop, peer)
                )
    return sends


def _receives(
    layout: Layout,
    actions: tuple[Action, ...],
    rank: int,
    channels: dict[tuple[int, int], list[Message]],
) -> tuple[dict[int, list[Message]], dict[int, list[Message]]]:
    """Receives to start before, and messages to wait for before, each action, by its index."""
    posts: dict[int, list[Message]] = defaultdict(list)
    waits: dict[int, list[Message]] = defaultdict(list)
    started: dict[int, int] = defaultdict(int)
    position: dict[int, dict[Message, int]] = {}
    ahead = _ahead(layout, rank)
    earlier: deque[int] = deque(maxlen=ahead)
    for i, action in enumerate(actions):
        if not isinstance(action, Compute):
            continue
        for result in inputs_of(layout, action):
            peer = layout.owner(result.stage, result.micro_batch)
            if peer == rank:
                continue
            samples = layout.shared_samples(
                action.stage, action.micro_batch, result.stage, result.micro_batch
            )
            message = Message(
                Kind.RECEIVE, result.gradient, result.stage, action.stage, samples.start, samples.stop, peer
            )
            waits[i].append(message)
            queue = channels[peer, rank]
            if peer not in position:
                position[peer] = {m: n for n, m in enumerate(queue)}
            upto = position[peer][message] + 1
            posts[earlier[0] if earlier else i] += queue[started[peer] : upto]
            started[peer] = max(started[peer], upto)
        earlier.append(i)
    return posts, waits


def _ahead(layout: Layout, rank: int) -> int:
    """Computations by which receives start before the one that waits.

    One, where each message comes from a neighbour of its own. Where n replicas take turns in sending to one
    rank, n forward passes and the backward passes between them.
    """
    turns = [
        -(-len(layout.stages[other].ranks) // len(layout.stages[stage].ranks))
        for stage in layout.hosted(rank)
        for other in (*layout.predecessors[stage], *layout.successors[stage])
    ]
    return 2 * max(turns, default=1) - 1
