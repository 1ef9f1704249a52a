"""Op-level placement: the cover of a graph by candidates that costs least, by dynamic programming.

In:  an OpGraph and candidates, each a convex set of operations with its cost.
Out: the candidates that cover every operation once, can run in some order, and cost least together.

Collage's Algorithm 1 takes costs as additive (equation 2.2). A state is the set of operations placed
so far; its cost-to-reach is final when all smaller states have been expanded. The paper visits frontier
nodes and, for each, all states before them. Here the next operation is the first one not yet placed:
a candidate with it is taken as soon as what it reads is placed. If it reads something that isn't, it is
*promised*, and what it waits for is placed first. With promises part of the state, every cover that can
run is reached, in one order only, so the result is exact.

Source: Collage, section 2.4.2, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.errors import PlacementError
from placement.graph import OpGraph, bits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of operations on a backend, and what it costs in seconds, entering and leaving included."""

    mask: int
    backend: str
    cost_s: float


@dataclass(frozen=True, slots=True)
class OpLevel:
    """The result of the search."""

    chosen: tuple[Candidate, ...]
    """In an order in which they can run."""
    cost_s: float
    """The sum of their costs: predicted, not measured."""
    exact: bool
    """False if states had to be left out (`max_states`): then it is a bound, and maybe not the least."""
    states: int
    """How many states were expanded."""


_State = tuple[int, tuple[int, ...]]
"""The operations placed, and the promised candidates (by number), the next one to serve last."""


@dataclass(slots=True)
class _Reached:
    cost_s: float
    previous: _State | None
    taken: int | None


@dataclass(slots=True)
class _Frontier:
    """States by how much they have placed and promised: in this order each is final when its turn comes."""

    levels: dict[tuple[int, int], dict[_State, _Reached]] = field(default_factory=dict)

    def offer(self, state: _State, reached: _Reached) -> None:
        """Notes a way to a state, if it is the cheapest so far."""
        level = self.levels.setdefault((state[0].bit_count(), len(state[1])), {})
        known = level.get(state)
        if known is None or reached.cost_s < known.cost_s:
            level[state] = reached

    def next_level(self, size: int) -> dict[_State, _Reached] | None:
        """The states of a size with the fewest promises that are left; expanding them makes deeper ones."""
        depths = [depth for placed, depth in self.levels if placed == size]
        return self.levels.pop((size, min(depths))) if depths else None


def place(graph: OpGraph, candidates: Sequence[Candidate], *, max_states: int = 20_000) -> OpLevel:
    """The cheapest cover.

    Args:
        graph: what to place.
        candidates: convex sets; every operation must be in some cover, as it is when one backend runs
            each operation alone.
        max_states: states of one size that are kept, the cheapest first.

    Raises:
        PlacementError: if no candidates cover the graph in an order that can run.
    """
    best = _cheapest(candidates)
    with_op: list[list[int]] = [[] for _ in range(len(graph))]
    above = []
    for number, candidate in enumerate(best):
        above.append(graph.above(candidate.mask))
        for i in bits(candidate.mask):
            with_op[i].append(number)
    frontier = _Frontier()
    start: _State = (0, ())
    frontier.offer(start, _Reached(0.0, None, None))
    expanded: dict[_State, _Reached] = {}
    exact = True
    for size in range(len(graph) + 1):
        while (level := frontier.next_level(size)) is not None:
            if len(level) > max_states:
                exact = False
                cheapest = sorted(level.items(), key=lambda item: item[1].cost_s)
                level = dict(cheapest[:max_states])
            for state, reached in level.items():
                expanded[state] = reached
                _expand(graph, best, with_op, above, state, reached, frontier)
    end: _State = (graph.all, ())
    if end not in expanded:
        lonely = [op for op in graph.ops if not with_op[op.index]]
        hint = f"; nothing runs {lonely[0]}" if lonely else ""
        raise PlacementError(f"the candidates cannot cover the graph in an order that can run{hint}")
    chosen = _trace(best, expanded, end)
    return OpLevel(chosen, expanded[end].cost_s, exact, len(expanded))


def _expand(
    graph: OpGraph,
    best: Sequence[Candidate],
    with_op: Sequence[Sequence[int]],
    above: Sequence[int],
    state: _State,
    reached: _Reached,
    frontier: _Frontier,
) -> None:
    placed, promised = state
    reserved = placed
    for number in promised:
        reserved |= best[number].mask
    if promised:
        waiting = above[promised[-1]] & ~placed
        if not waiting:
            _take(best, state, reached, promised[-1], promised[:-1], frontier)
            return
        if waiting & reserved:
            return  # it waits for another promised candidate that waits for it
    else:
        waiting = graph.all & ~placed
        if not waiting:
            return
    target = next(bits(waiting))
    for number in with_op[target]:
        if best[number].mask & reserved:
            continue
        if above[number] & ~placed:
            frontier.offer((placed, (*promised, number)), _Reached(reached.cost_s, state, None))
        else:
            _take(best, state, reached, number, promised, frontier)


def _take(
    best: Sequence[Candidate],
    state: _State,
    reached: _Reached,
    number: int,
    promised: tuple[int, ...],
    frontier: _Frontier,
) -> None:
    candidate = best[number]
    new: _State = (state[0] | candidate.mask, promised)
    frontier.offer(new, _Reached(reached.cost_s + candidate.cost_s, state, number))


def _cheapest(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of candidates for the same operations only the cheapest matters."""
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        if candidate.mask not in best or candidate.cost_s < best[candidate.mask].cost_s:
            best[candidate.mask] = candidate
    return [c for c in best.values() if c.cost_s != float("inf")]


def _trace(best: Sequence[Candidate], expanded: dict[_State, _Reached], end: _State) -> tuple[Candidate, ...]:
    chosen: list[Candidate] = []
    state: _State | None = end
    while state is not None:
        reached = expanded[state]
        if reached.taken is not None:
            chosen.append(best[reached.taken])
        state = reached.previous
    return tuple(reversed(chosen))
