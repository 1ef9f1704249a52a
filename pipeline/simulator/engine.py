"""Discrete events: ranks that compute, links that transfer.

In:  a program, costs, a topology and the devices of each rank.
Out: a `Result`.

The rank whose time is earliest goes on until it computes or has to wait; so everything is started in the
order of time, and links serve in that order. A transfer needs both ends (rendezvous) or, eager, only the
giving one. It occupies its links for its bytes and arrives one latency later. Without a topology transfers
take no time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from pipeline.actions import GIVING, Action, Compute, Kind, Message, Transfer, Wait, Weights, other_end
from pipeline.errors import ProgramError
from pipeline.memory import changes, initial_bytes, message_bytes, recomputed_items, transfer_bytes
from pipeline.plans import StageCost
from pipeline.program import Program
from pipeline.simulator.result import Event, Result
from pipeline.topology import Resource, Topology

Key = tuple[object, ...]
"""What both ends of a transfer have in common."""


def simulate(
    program: Program,
    costs: Sequence[StageCost],
    topology: Topology | None = None,
    *,
    devices: Sequence[Sequence[int]] | None = None,
    rendezvous: bool = True,
    update_s: Sequence[float] | None = None,
) -> Result:
    """Simulate a program.

    Args:
        program: A valid program.
        costs: Cost of each stage, for one of its micro-batches.
        topology: The machines; None: transfers take no time.
        devices: Devices of each rank; device r for rank r when left out. Transfers go between the first ones.
        rendezvous: Whether a transfer starts only when both ends have been started.
        update_s: Seconds of an `UPDATE` of each stage; none when left out.

    Raises:
        ProgramError: Ranks wait for each other; `validate` says more.
    """
    ranks = [(r,) for r in range(len(program.ranks))] if devices is None else devices
    return _Engine(program, costs, topology, ranks, rendezvous, update_s).run()


class _Engine:
    """The state of one simulation."""

    def __init__(
        self,
        program: Program,
        costs: Sequence[StageCost],
        topology: Topology | None,
        devices: Sequence[Sequence[int]],
        rendezvous: bool,
        update_s: Sequence[float] | None,
    ) -> None:
        self.program, self.costs, self.topology = program, costs, topology
        self.devices, self.rendezvous = devices, rendezvous
        self.update_s = [0.0] * len(costs) if update_s is None else update_s
        self.recomputed = recomputed_items(program)
        self.events: list[Event] = []
        count = len(program.ranks)
        self.at = [0] * count
        self.cause = [-1] * count  # the event that each rank last waited for or ran
        self.queue: list[tuple[float, int]] = [(0.0, r) for r in range(count)]
        self.started: dict[Key, int] = {}  # the rank that has started one end of what is not matched yet
        self.done: dict[Key, tuple[float, int]] = {}  # end and event of each transfer
        self.waiting: dict[Key, list[int]] = defaultdict(list)
        self.free: dict[Resource, tuple[float, int]] = {}  # when each link is free, and after which event
        self.routes: dict[tuple[int, int], tuple[float, float, tuple[Resource, ...]]] = {}
        self.meeting: dict[Weights, list[tuple[float, int]]] = defaultdict(list)
        self.changes = changes(program, costs)
        self.held = [initial_bytes(program.layout, costs, r) for r in range(count)]
        self.memory = [[(0.0, held)] for held in self.held]
        self.makespan = 0.0

    def run(self) -> Result:
        heapq.heapify(self.queue)
        while self.queue:
            time, r = heapq.heappop(self.queue)
            self._go_on(r, time)
        for r, actions in enumerate(self.program.ranks):
            if self.at[r] < len(actions):
                raise ProgramError(f"rank {r}, index {self.at[r]}: {actions[self.at[r]]} waits for ever.")
        return Result(
            self.program, tuple(self.events), self.makespan, tuple(tuple(trace) for trace in self.memory)
        )

    def _go_on(self, r: int, time: float) -> None:
        """Take steps of a rank until it computes or waits; what it did at `at - 1` ends now."""
        actions = self.program.ranks[r]
        self.makespan = max(self.makespan, time)
        while self.at[r] < len(actions):
            i = self.at[r]
            action = actions[i]
            if isinstance(action, Compute):
                self._take(r, i, time)
                end = time + self._seconds(action)
                self._give_back(r, i, end)
                self._record(r, -1, action, time, end, self.cause[r])
                self.cause[r] = len(self.events) - 1
                self.at[r] += 1
                heapq.heappush(self.queue, (end, r))
                return
            if isinstance(action, Wait):
                key = _key(action.on)
                if key not in self.done:
                    self.waiting[key].append(r)
                    return
                end, event = self.done[key]
                self.at[r] += 1
                if end > time:
                    self.cause[r] = event
                self._give_back(r, i, max(end, time))
                if end > time:
                    heapq.heappush(self.queue, (end, r))
                    return
            elif isinstance(action, Weights):
                self._take(r, i, time)
                if action.kind is Kind.REDUCE:
                    self._meet(r, action, time)
                    return
                self.at[r] += 1
                if action.kind is Kind.UPDATE and self.update_s[action.stage]:
                    end = time + self.update_s[action.stage]
                    self._record(r, -1, action, time, end, self.cause[r])
                    self.cause[r] = len(self.events) - 1
                    heapq.heappush(self.queue, (end, r))
                    return
            else:
                self._take(r, i, time)
                self.at[r] += 1
                self._start(r, action, time)

    def _start(self, r: int, action: Message | Transfer, time: float) -> None:
        key = _key(action)
        gives = action.kind in GIVING
        other = self.started.pop(key, None)
        if other is None:
            self.started[key] = r
        if gives and (other is not None or not self.rendezvous):
            self._transfer(key, action, r, time, self.cause[r])
        elif other is not None and key not in self.done:
            self._transfer(key, other_end(action, r), other, time, self.cause[r])

    def _transfer(self, key: Key, action: Message | Transfer, giver: int, time: float, cause: int) -> None:
        latency, per_byte, links = self._route(giver, action.peer)
        start = time
        for link in links:
            free, event = self.free.get(link, (0.0, -1))
            if free > start:
                start, cause = free, event
        occupied = start + per_byte * self._bytes(action)
        end = occupied + latency
        self._record(giver, action.peer, action, start, end, cause)
        event = len(self.events) - 1
        for link in links:
            self.free[link] = (occupied, event)
        self.done[key] = (end, event)
        for r in self.waiting.pop(key, ()):
            self.cause[r] = event
            heapq.heappush(self.queue, (end, r))

    def _meet(self, r: int, action: Weights, time: float) -> None:
        """A `REDUCE` starts when the last replica has come to it, and ends for all at once."""
        here = self.meeting[action]
        here.append((time, r))
        group = self.program.layout.stages[action.stage].ranks
        if len(here) < len(group):
            return
        end = time + self._reduce_seconds(action.stage, group)
        self._record(r, -1, action, time, end, self.cause[r])
        for _, member in here:
            self.at[member] += 1
            self.cause[member] = len(self.events) - 1
            heapq.heappush(self.queue, (end, member))

    def _reduce_seconds(self, stage: int, group: Sequence[int]) -> float:
        if self.topology is None:
            return 0.0
        ring = [self.devices[r][0] for r in group]
        return ring_seconds(self.topology, ring, self.costs[stage].parameter_bytes)

    def _seconds(self, action: Compute) -> float:
        cost = self.costs[action.stage]
        if action.kind is Kind.BACKWARD:
            return cost.backward_s
        if action.kind is Kind.BACKWARD_INPUT:
            return cost.backward_s * cost.input_fraction
        if action.kind is Kind.BACKWARD_WEIGHT:
            return cost.backward_s * (1 - cost.input_fraction)
        return cost.forward_s

    def _bytes(self, action: Message | Transfer) -> float:
        if isinstance(action, Message):
            return message_bytes(self.program.layout, self.costs, action)
        recomputed = (action.stage, action.micro_batch) in self.recomputed
        return transfer_bytes(self.costs[action.stage], recomputed=recomputed)

    def _route(self, a: int, b: int) -> tuple[float, float, tuple[Resource, ...]]:
        if self.topology is None:
            return 0.0, 0.0, ()
        if (a, b) not in self.routes:
            self.routes[a, b] = self.topology.transfer(self.devices[a][0], self.devices[b][0])
        return self.routes[a, b]

    def _record(self, rank: int, peer: int, action: Action, start: float, end: float, cause: int) -> None:
        self.events.append(Event(rank, peer, action, start, end, cause))
        self.makespan = max(self.makespan, end)

    def _take(self, r: int, i: int, time: float) -> None:
        change = self.changes[r][i].before
        if change:
            self.held[r] += change
            self.memory[r].append((time, self.held[r]))

    def _give_back(self, r: int, i: int, time: float) -> None:
        change = self.changes[r][i].after
        if change:
            self.held[r] -= change
            self.memory[r].append((time, self.held[r]))


def ring_seconds(topology: Topology, ring: Sequence[int], size: float) -> float:
    """Seconds of adding up `size` bytes of each device of a ring, by reduce-scatter and all-gather."""
    return 2 * (len(ring) - 1) / len(ring) * size * topology.ring_seconds_per_byte(ring)


def _key(action: Message | Transfer) -> Key:
    if isinstance(action, Message):
        return (action.gradient, action.source, action.target, action.start)
    return (action.kind in (Kind.EVICT, Kind.ACCEPT), action.stage, action.micro_batch)
