"""What the planners of repetitive models share: a chain of blocks, cut into stages of equal length.

In:  profiled graphs of one model at one or several micro-batch sizes.
Out: the cost of a stage at any micro-batch size, as measured where it was, in proportion elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from pipeline.errors import PlanError
from pipeline.graph import Cost, ProfiledGraph, as_digraph


@dataclass(frozen=True, slots=True)
class Blocks:
    """A chain of blocks and what they cost by micro-batch size."""

    name: str
    ids: tuple[str, ...]
    measured: Mapping[int, tuple[Cost, ...]]

    def costs(self, micro_batch: int) -> tuple[Cost, ...]:
        """Cost of each block for a micro-batch of so many samples.

        Between measurements, times and activations are in proportion to the nearest one that is not larger,
        or to the smallest.
        """
        base = max((b for b in self.measured if b <= micro_batch), default=min(self.measured))
        f = micro_batch / base
        return tuple(
            Cost(
                c.forward_ms * f, c.backward_ms * f, c.output_bytes * f, c.parameter_bytes, c.saved_bytes * f
            )
            for c in self.measured[base]
        )


def blocks_of(graph: ProfiledGraph, profiles: Sequence[ProfiledGraph] = ()) -> Blocks:
    """The blocks of a model that is a chain.

    Args:
        graph: Its profile.
        profiles: Further profiles of the same model, at other micro-batch sizes.

    Raises:
        PlanError: The model is no chain, or a profile is of another one.
    """
    digraph = as_digraph(graph.model)
    ids = tuple(nx.topological_sort(digraph))
    if not ids or set(graph.model.edges) != set(pairwise(ids)):
        raise PlanError(f"{graph.model.name} is no chain of blocks, which this planner needs.")
    measured = {}
    for profile in (graph, *profiles):
        if profile.model != graph.model:
            raise PlanError(
                f"a further profile is of {profile.model.name}, not of {graph.model.name} as it is."
            )
        by_id = profile.cost_of()
        measured[profile.samples] = tuple(by_id[i] for i in ids)
    return Blocks(graph.model.name, ids, measured)


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]
