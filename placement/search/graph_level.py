"""Graph-level placement: what graph-level backends should take over, by evolutionary search.

In:  the op-level placement and a function that measures whole placements.
Out: the fastest placement measured, and how the search went.

An individual says for each part of the op-level placement whether to keep it (0) or to give it to
graph-level backend k (k). Parts that one graph-level backend gets and that touch are merged. Fitness is
time end to end, relative to the op-level placement measured in the same rounds, so that a machine that
becomes slower is no disadvantage to later generations. The first generation holds the op-level result
and every single backend. Crossover is two-point, as in the paper; mutation gives a stretch of parts to
one backend, since cross-operation optimization needs neighbours. DEAP selects and crosses.

Source: Collage, section 2.4.3, figure 2.6.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from placement.errors import PlacementError
from placement.graph import OpGraph
from placement.placements import Part, Placement, merged

Evaluate = Callable[[Sequence[Placement]], list[float]]
"""From placements to their times relative to the op-level placement's; infinite where one can't run."""
Genes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the search."""

    population: int = 8
    generations: int = 50
    patience: int = 5
    """Generations without a better placement after which the search has saturated."""
    crossover: float = 0.6
    """Probability that two individuals are crossed."""
    mutation: float = 0.7
    """Probability that an individual is mutated."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The state after a generation."""

    generation: int
    elapsed_s: float
    best: float
    """The best time so far, relative to the op-level placement's."""
    evaluated: int
    """Placements measured so far."""


@dataclass
class GraphLevel:
    """The result of the search."""

    placement: Placement
    ratio: float
    """Its time relative to the op-level placement's."""
    steps: list[Step] = field(default_factory=list)
    stopped: str = ""
    """`saturated`, `time` or `generations`."""


def decode(graph: OpGraph, start: Placement, genes: Genes, backends: Sequence[str]) -> Placement:
    """The placement that an individual stands for."""
    parts = [
        Part(part.mask, backends[gene - 1]) if gene else part
        for part, gene in zip(start.parts, genes, strict=True)
    ]
    return merged(graph, Placement.of(graph, parts), backends)


def evolve(
    graph: OpGraph,
    start: Placement,
    backends: Sequence[str],
    evaluate: Evaluate,
    deadline: float,
    settings: Settings | None = None,
) -> GraphLevel:
    """Searches until the deadline (of `time.perf_counter`), saturation or the last generation.

    Args:
        graph: what is placed.
        start: the op-level placement.
        backends: names of graph-level backends.
        evaluate: measures placements; a generation is measured together.
        deadline: when to stop.
        settings: of the search; None: the defaults.
    """
    settings = settings or Settings()
    result = GraphLevel(start, 1.0)
    if not backends or not start.parts:
        result.stopped = "saturated"
        return result
    before = random.getstate()
    random.seed(settings.seed)  # DEAP draws from Python's global generator
    try:
        return _evolve(graph, start, backends, evaluate, deadline, settings, result)
    finally:
        random.setstate(before)


def _evolve(
    graph: OpGraph,
    start: Placement,
    backends: Sequence[str],
    evaluate: Evaluate,
    deadline: float,
    settings: Settings,
    result: GraphLevel,
) -> GraphLevel:
    rng = random.Random(settings.seed)
    toolbox, tools = _toolbox(), _deap()[2]
    began = time.perf_counter()
    known: dict[Genes, float] = {}
    shapes: dict[Placement, float] = {}
    population = [_individual(genes) for genes in _first(len(start.parts), len(backends), settings, rng)]
    waiting = 0
    for generation in range(settings.generations):
        _measure(graph, start, backends, evaluate, population, known, shapes)
        best = tools.selBest(population, 1)[0]
        improved = best.fitness.values[0] < result.ratio
        if improved:
            result.ratio = best.fitness.values[0]
            result.placement = decode(graph, start, tuple(best), backends)
        waiting = 0 if improved else waiting + 1
        elapsed = time.perf_counter() - began
        result.steps.append(Step(generation, elapsed, result.ratio, len(shapes)))
        if waiting >= settings.patience:
            result.stopped = "saturated"
            return result
        if time.perf_counter() >= deadline:
            result.stopped = "time"
            return result
        offspring = [toolbox.clone(i) for i in tools.selTournament(population, settings.population, 2)]
        _vary(offspring, toolbox, settings, rng, len(backends))
        fresh = [i for i in offspring if tuple(i) not in known]
        _measure(graph, start, backends, evaluate, fresh, known, shapes)
        pool = {tuple(i): i for i in (*population, *fresh)}
        population = tools.selBest(list(pool.values()), settings.population)
    result.stopped = "generations"
    return result


def _deap() -> tuple[Any, Any, Any]:
    try:
        from deap import base, creator, tools
    except ImportError as error:
        raise PlacementError(
            f"the graph-level search needs DEAP, which cannot be imported ({error}). Install it with "
            "pip install 'coexec[placement]', or stop after the op-level search with level=\"op\"."
        ) from error
    return base, creator, tools


def _toolbox() -> Any:
    base, creator, tools = _deap()
    if not hasattr(creator, "PlacementTime"):
        creator.create("PlacementTime", base.Fitness, weights=(-1.0,))
        creator.create("PlacementGenes", list, fitness=creator.PlacementTime)
    toolbox = base.Toolbox()
    toolbox.register("mate", tools.cxTwoPoint)
    return toolbox


def _individual(genes: Genes) -> list[int]:
    individual: list[int] = _deap()[1].PlacementGenes(genes)
    return individual


def _first(parts: int, backends: int, settings: Settings, rng: random.Random) -> list[Genes]:
    """The op-level result, every single backend, and neighbours of these."""
    first = [(0,) * parts, *((k,) * parts for k in range(1, backends + 1))]
    while len(first) < settings.population:
        genes = list(rng.choice(first[: backends + 1]))
        _mutate(genes, rng, backends)
        first.append(tuple(genes))
    return list(dict.fromkeys(first))


def _mutate(genes: list[int], rng: random.Random, backends: int) -> None:
    """Gives a stretch of parts to one backend, or back to the op-level placement."""
    length = max(1, round(len(genes) ** rng.random()))
    first = rng.randrange(len(genes) - length + 1)
    genes[first : first + length] = [rng.randrange(backends + 1)] * length


def _vary(
    offspring: list[list[int]], toolbox: Any, settings: Settings, rng: random.Random, backends: int
) -> None:
    for left, right in zip(offspring[::2], offspring[1::2], strict=False):
        if len(left) > 2 and rng.random() < settings.crossover:
            toolbox.mate(left, right)
    for individual in offspring:
        if rng.random() < settings.mutation:
            _mutate(individual, rng, backends)
        del individual.fitness.values  # type: ignore[attr-defined]


def _measure(
    graph: OpGraph,
    start: Placement,
    backends: Sequence[str],
    evaluate: Evaluate,
    population: list[list[int]],
    known: dict[Genes, float],
    shapes: dict[Placement, float],
) -> None:
    """Gives each individual its fitness; individuals that mean the same placement are measured once."""
    decoded = {}
    for individual in population:
        genes = tuple(individual)
        if genes not in known:
            decoded[genes] = decode(graph, start, genes, backends)
    new = [p for p in dict.fromkeys(decoded.values()) if p not in shapes]
    if new:
        shapes.update(zip(new, evaluate(new), strict=True))
    for genes, placement in decoded.items():
        known[genes] = shapes[placement]
    for individual in population:
        individual.fitness.values = (known[tuple(individual)],)  # type: ignore[attr-defined]
