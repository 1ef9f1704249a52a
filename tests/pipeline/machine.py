"""A machine that really runs programs, on symbolic values: what the validator is judged by.

It shares no rule with the validator. Values are nested tuples that say how they were computed; weights are
tuples that say which gradients went in. Ranks run in turn until all are done or none can go on. Whatever
would read something that isn't there is a crash.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from pipeline.actions import Action, Compute, Kind, Message, Transfer, Wait, Weights
from pipeline.program import Program


class Crash(Exception):
    """A rank read what isn't there."""


class Hang(Exception):
    """No rank can go on."""


@dataclass
class Rank:
    weights: dict[int, Any] = field(default_factory=dict)
    version: dict[int, int] = field(default_factory=dict)
    stash: dict[tuple[int, int], Any] = field(default_factory=dict)
    gradients: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[tuple[bool, int, int], Any] = field(default_factory=dict)
    inbox: dict[tuple[bool, int, int, int, int], Any] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Any] = field(default_factory=dict)
    saved: dict[tuple[int, int], Any] = field(default_factory=dict)
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    halves: dict[tuple[int, int], Any] = field(default_factory=dict)
    at: int = 0
    incoming: int = 0
    most: int = 0


@dataclass
class End:
    """One end of a message or transfer that a rank has started."""

    action: Message | Transfer
    value: Any = None
    other: End | None = None


GIVES = {Kind.SEND, Kind.EVICT, Kind.RETURN}


class Machine:
    """Runs one program; `matching` as in the validator."""

    def __init__(self, program: Program, matching: str) -> None:
        self.program, self.layout, self.matching = program, program.layout, matching
        self.ranks = [Rank() for _ in program.ranks]
        for s, stage in enumerate(self.layout.stages):
            for r in stage.ranks:
                self.ranks[r].weights[s] = ("w", s)
                self.ranks[r].version[s] = 0
        self.queues: dict[Any, deque[End]] = defaultdict(deque)
        self.ends: list[dict[Any, deque[End]]] = [defaultdict(deque) for _ in self.ranks]
        self.meetings: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.arrived: set[tuple[int, int]] = set()

    def run(self) -> tuple[Any, int]:
        """Final weights by rank and stage, and the most micro-batches that any rank held."""
        moved = True
        while moved:
            moved = False
            for r in range(len(self.ranks)):
                while self.ranks[r].at < len(self.program.ranks[r]) and self.step(
                    r, self.program.ranks[r][self.ranks[r].at]
                ):
                    self.ranks[r].at += 1
                    moved = True
        for rank, actions in zip(self.ranks, self.program.ranks, strict=True):
            if rank.at < len(actions):
                raise Hang
        if any(self.queues.values()):
            raise Hang  # a rank does not end while something it has started is open
        final = [sorted((s, str(w)) for s, w in rank.weights.items()) for rank in self.ranks]
        return final, max(rank.most for rank in self.ranks)

    def step(self, r: int, action: Action) -> bool:
        """Whether the rank could take the step."""
        rank = self.ranks[r]
        if isinstance(action, Wait):
            return self.wait(r, action)
        if isinstance(action, Message | Transfer):
            self.start(r, action)
        elif isinstance(action, Weights):
            return self.change_weights(r, action)
        else:
            self.compute(r, action)
        held = len(rank.saved) + len(rank.held) + rank.incoming
        rank.most = max(rank.most, held)
        return True

    def start(self, r: int, action: Message | Transfer) -> None:
        rank = self.ranks[r]
        end = End(action)
        try:
            if isinstance(action, Message):
                if action.kind is Kind.SEND:
                    made = action.start // self.layout.stages[action.source].size
                    end.value = rank.outputs[action.gradient, action.source, made]
            elif action.kind is Kind.EVICT:
                end.value = rank.saved[action.stage, action.micro_batch]
            elif action.kind is Kind.RETURN:
                end.value = rank.held[action.stage, action.micro_batch]
            else:
                rank.incoming += 1
        except (KeyError, IndexError):
            raise Crash from None
        gives = action.kind in GIVES
        path = (r, action.peer) if gives else (action.peer, r)
        channel: Any = (*path, isinstance(action, Message))
        if self.matching == "tags":
            kind = {Kind.EVICT: "out", Kind.ACCEPT: "out", Kind.LOAD: "back", Kind.RETURN: "back"}
            channel = (*channel, kind.get(action.kind), action[1:-1])
        waiting = self.queues[channel, not gives]
        if waiting:
            other = waiting.popleft()
            end.other, other.other = other, end
        else:
            self.queues[channel, gives].append(end)
        self.ends[r][action].append(end)

    def wait(self, r: int, action: Wait) -> bool:
        rank, on = self.ranks[r], action.on
        ends = self.ends[r][on]
        if not ends:
            raise Crash
        if ends[0].other is None:
            return False
        end = ends.popleft()
        other = end.other
        if isinstance(on, Message):
            if on.kind is Kind.RECEIVE:
                rank.inbox[on.gradient, on.source, on.target, on.start, on.stop] = other.value
            return True
        item = (on.stage, on.micro_batch)
        try:
            if on.kind is Kind.EVICT:
                del rank.saved[item]
            elif on.kind is Kind.RETURN:
                del rank.held[item]
            else:
                rank.incoming -= 1
                (rank.held if on.kind is Kind.ACCEPT else rank.saved)[item] = other.value
        except KeyError:
            raise Crash from None
        return True

    def change_weights(self, r: int, action: Weights) -> bool:
        rank, s = self.ranks[r], action.stage
        if s not in rank.weights:
            raise Crash
        if action.kind is Kind.STASH:
            if rank.version[s] != action.version:
                raise Crash
            rank.stash[s, action.version] = rank.weights[s]
        elif action.kind is Kind.UPDATE:
            rank.weights[s] = (rank.weights[s], tuple(sorted(map(str, rank.gradients.pop(s, [])))))
            rank.version[s] = action.version
        else:
            return self.reduce(r, s)
        return True

    def reduce(self, r: int, s: int) -> bool:
        """The n-th `REDUCE` of a stage on each of its replicas meet."""
        group, counts = self.layout.stages[s].ranks, self.meetings[s]
        if (r, s) not in self.arrived:
            self.arrived.add((r, s))
            counts[r] += 1
        if any(counts[q] < counts[r] for q in group):
            return False
        here = [q for q in group if (q, s) in self.arrived and counts[q] == counts[r]]
        if len(here) == len(group):
            total = sorted((g for q in group for g in self.ranks[q].gradients[s]), key=str)
            for q in group:
                self.ranks[q].gradients[s] = list(total)
        self.arrived.discard((r, s))
        return True

    def compute(self, r: int, a: Compute) -> None:
        rank, item = self.ranks[r], (a.stage, a.micro_batch)
        if a.stage not in rank.weights:
            raise Crash
        if a.version == rank.version[a.stage]:
            weights = rank.weights[a.stage]
        elif (a.stage, a.version) in rank.stash:
            weights = rank.stash[a.stage, a.version]
        else:
            raise Crash
        try:
            if a.kind is Kind.FORWARD:
                rank.inputs[item] = self.read(rank, r, a, False)
                value = hash((item, hash(str(weights)), rank.inputs[item]))
                rank.saved[item] = rank.outputs[(False, *item)] = value
            elif a.kind is Kind.RECOMPUTE:
                if item not in rank.saved:
                    raise Crash
                rank.saved[item] = hash((item, hash(str(weights)), rank.inputs[item]))
            elif a.kind is Kind.BACKWARD_WEIGHT:
                saved = rank.saved.pop(item)
                rank.gradients[a.stage].append(
                    ("g", item, hash((saved, hash(str(weights)), rank.halves.pop(item))))
                )
            else:
                upstream = hash(self.read(rank, r, a, True))
                saved = rank.saved[item]
                rank.outputs[(True, *item)] = hash((saved, hash(str(weights)), upstream))
                if a.kind is Kind.BACKWARD:
                    del rank.saved[item]
                    rank.gradients[a.stage].append(("g", item, hash((saved, hash(str(weights)), upstream))))
                else:
                    rank.halves[item] = upstream
        except KeyError:
            raise Crash from None

    def read(self, rank: Rank, r: int, a: Compute, gradient: bool) -> Any:
        size = self.layout.stages[a.stage].size
        first, last = a.micro_batch * size, (a.micro_batch + 1) * size
        if last > self.layout.samples:
            raise Crash
        neighbours = self.layout.successors if gradient else self.layout.predecessors
        values = []
        for other in neighbours[a.stage]:
            other_size = self.layout.stages[other].size
            for j in range(self.layout.micro_batches(other)):
                start, stop = max(first, j * other_size), min(last, (j + 1) * other_size)
                if start < stop:
                    if self.layout.owner(other, j) == r:
                        values.append(rank.outputs[gradient, other, j])
                    else:
                        values.append(rank.inbox[gradient, other, a.stage, start, stop])
        return tuple(values)


def outcome(program: Program, matching: str) -> Any:
    """Final weights and the peak, or `crash` or `hang`."""
    try:
        return Machine(program, matching).run()
    except Crash:
        return "crash", 0
    except Hang:
        return "hang", 0
