"""Search: one optimization, from a captured model to the best placement measured.

offers -> costs -> op-level -> merging -> graph-level -> final comparison
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from placement.backends.base import Backend, Run
from placement.backends.optional import missing_packages
from placement.capture import Captured
from placement.executable import build
from placement.graph import bits
from placement.measuring.measurer import Measurer
from placement.measuring.protocol import Measurement, measure
from placement.placed import Placed
from placement.placements import Part, Placement
from placement.registry import REFERENCE, Registry
from placement.report import Report, Row, Times
from placement.search.candidates import offers
from placement.search.costs import Costs, Progress, collect
from placement.search.graph_level import GraphLevel, Settings, evolve
from placement.search.merging import merge_measured
from placement.search.op_level import Candidate, OpLevel, place
from placement.segments import Segment
from placement.switching import switch_cost

log = logging.getLogger(__name__)
Level = Literal["op", "graph"]
OP_LEVEL_SHARE = 0.6
"""Of the budget, for measuring costs; the rest is the graph-level search's."""
NOISE = 1.03
"""How far apart costs of the final comparison may be and say nothing."""


@dataclass(frozen=True)
class Explored:
    """A finished search."""

    placed: Placed
    """The best of the contenders."""
    contenders: dict[str, Callable[..., tuple[torch.Tensor, ...]]]
    """What was compared in the end, by name, as functions of the graph's inputs."""


def simplest_of_the_best(measured: Mapping[str, Measurement], placements: Mapping[str, Placement]) -> str:
    """The placement that leaves ATen for the fewest parts, of those that noise doesn't tell from the best."""
    best = min(m.cost_s for m in measured.values())
    close = [name for name, m in measured.items() if m.cost_s <= NOISE * best]

    def moved(name: str) -> int:
        return sum(part.backend != REFERENCE for part in placements[name].parts)

    return min(close, key=lambda name: (moved(name), measured[name].cost_s))


@dataclass
class Search:
    """One optimization."""

    captured: Captured
    inputs: list[torch.Tensor]
    backends: list[Backend]
    measurer: Measurer
    progress: Progress = lambda what, done, total: None
    before_final: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.graph = self.captured.graph
        self.by_name = {b.name: b for b in self.backends}
        for backend in self.backends:
            backend.attach(self.measurer.costs)
        self.notes: list[str] = []

    def run(
        self, registry: Registry, budget_s: float, level: Level, fuel: int | None, seed: int, capture_s: float
    ) -> Explored:
        """The whole search."""
        marks = [time.perf_counter()]
        op_level, costs, op_placement = self._op_level(registry, marks[0] + budget_s * OP_LEVEL_SHARE)
        marks.append(time.perf_counter())
        graph_level = GraphLevel(op_placement, 1.0)
        if level == "graph":
            graph_level = self._graph_level(op_placement, marks[0] + budget_s, seed)
        marks.append(time.perf_counter())
        contenders = {"op-level": op_placement, "graph-level": graph_level.placement}
        if fuel is not None:
            contenders = {"op-level": graph_level.placement.limited(self.graph, fuel)}
            self.notes.append(f"fuel: only the first {fuel} parts left ATen")
        else:
            singles = {f"single {b.name}": self._single(b) for b in self.backends}
            contenders.update({name: p for name, p in singles.items() if p is not None})
        measured = self._compare(contenders)
        winner = simplest_of_the_best(measured, contenders)
        marks.append(time.perf_counter())
        placement = contenders[winner]
        spent = self.measurer.spent
        op_level_s, graph_level_s, final_s = (b - a for a, b in pairwise(marks))
        report = Report(
            tuple(self._row(part, costs) for part in placement.parts),
            winner,
            op_level.cost_s,
            measured,
            op_level.exact,
            tuple(graph_level.steps),
            graph_level.stopped,
            Times(
                capture_s,
                op_level_s,
                graph_level_s,
                final_s,
                spent.compiling_s,
                spent.measuring_s,
                spent.measured,
                spent.from_log,
            ),
            tuple(self.notes),
        )
        functions = {name: self.function(p) for name, p in contenders.items()}
        return Explored(Placed(self.captured, placement, functions[winner], report), functions)

    def _op_level(self, registry: Registry, deadline: float) -> tuple[OpLevel, Costs, Placement]:
        found = offers(self.graph, self.backends, registry)
        self.notes += found.notes
        costs = collect(found, self.backends, self.measurer, deadline, self.progress)
        self.notes += _failures(costs)
        if costs.unmeasured:
            self.notes.append(f"the time was up with {costs.unmeasured} offers of backends unmeasured")
        switch_s = {b.name: switch_cost(b, costs, self.measurer) for b in self.backends}
        candidates = [
            Candidate(mask, name, m.cost_s + switch_s[name]) for (name, mask), m in costs.of.items() if m.ok
        ]
        result = place(self.graph, candidates)
        placement = Placement.of(self.graph, [Part(c.mask, c.backend) for c in result.chosen])
        placement = merge_measured(
            self.graph, placement, self.backends, costs, self.measurer, deadline, switch_s
        )
        return result, costs, placement

    def _graph_level(self, start: Placement, deadline: float, seed: int) -> GraphLevel:
        why = missing_packages("deap")
        if why:
            self.notes.append(f"there was no graph-level search: {why}")
            log.warning("no graph-level search: %s", why)
            return GraphLevel(start, 1.0)
        names = [b.name for b in self.backends if b.level == "graph"]
        baseline = _bind(self.function(start), self.inputs)
        count = 0

        def evaluate(placements: Sequence[Placement]) -> list[float]:
            nonlocal count
            calls: list[Callable[[], object]] = [baseline]
            runnable = []
            for placement in placements:
                count += 1
                self.progress(f"graph-level search, placement {count}", 0, 0)
                late = time.perf_counter() > deadline
                function = None if late else self._try(placement)
                runnable.append(function is not None)
                if function is not None:
                    calls.append(_bind(function, self.inputs))
            base, *results = measure(calls, self.measurer.protocol)
            ratios = iter([r.cost_s / base.cost_s for r in results])
            return [next(ratios) if ok else float("inf") for ok in runnable]

        return evolve(self.graph, start, names, evaluate, deadline, Settings(seed=seed))

    def _single(self, backend: Backend) -> Placement | None:
        """Everything on one backend; None where it can't run everything."""
        if backend.name == REFERENCE:
            return Placement.of(self.graph, [Part(1 << i, REFERENCE) for i in bits(self.graph.all)])
        placement = Placement.single(self.graph, backend.name)
        return placement if self._try(placement) else None

    def _try(self, placement: Placement) -> Callable[..., tuple[torch.Tensor, ...]] | None:
        try:
            return self.function(placement)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
            if len(placement.parts) == 1 and message not in self.notes:
                self.notes.append(message)
            return None

    def function(self, placement: Placement) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A placement as a function of the graph's inputs."""
        parts: dict[Part, tuple[Segment, Run]] = {}
        for part in placement.parts:
            if part.backend != REFERENCE:
                run = self.measurer.run(self.by_name[part.backend], part.mask)
                parts[part] = (self.measurer.segment(part.mask), run)
        return build(self.graph, placement, parts)

    def _compare(self, contenders: dict[str, Placement]) -> dict[str, Measurement]:
        """Measures placements end to end in fresh rounds; equal ones are measured once."""
        functions = {p: self.function(p) for p in dict.fromkeys(contenders.values())}
        self.progress("final comparison", 0, 0)
        self.before_final()
        calls = [_bind(f, self.inputs) for f in functions.values()]
        protocol = replace(self.measurer.protocol, limit_s=4 * self.measurer.protocol.limit_s)
        results = dict(zip(functions, measure(calls, protocol), strict=True))
        return {name: results[p] for name, p in contenders.items()}

    def _row(self, part: Part, costs: Costs) -> Row:
        segment = self.measurer.segment(part.mask)
        known = costs.alternatives(part.mask)
        return Row(
            segment.title,
            ", ".join(map(str, segment.inputs)),
            part.mask.bit_count(),
            part.backend,
            known.pop(part.backend, None),
            known,
        )


def _failures(costs: Costs) -> list[str]:
    """How often each backend was wrong, crashed or hung, with an example."""
    found: dict[tuple[str, str], list[str]] = {}
    for (name, _), m in costs.of.items():
        if m.status in ("wrong", "crashed", "hung"):
            found.setdefault((name, m.status), []).append(m.detail)
    return [f"{name}: {len(d)} {status}, such as: {d[0]}" for (name, status), d in found.items()]


def _bind(function: Callable[..., object], inputs: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: function(*inputs)
