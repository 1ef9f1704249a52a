"""What a stage and a cut cost to PipeDream's planner, as the paper prints it and as its code counts.

In:  the sums between any two states, and the machines of one level.
Out: arrays of seconds per micro-batch, entry `[i, j]` for what lies between state i - 1 and state j, infinite
     where state i - 1 is not inside state j.

Both divide by the replicas, since these work on different micro-batches. They differ in this:

    paper      a stage takes the longer of computing and of synchronising 2(m-1)w bytes over m replicas;
               a cut takes 2a bytes; the slowest of all counts
    original   a stage takes the sum of computing and of synchronising 4(m-1)w/m bytes; at the start of a
               level's pipeline that is also divided by the machines inside one of the level below; a cut
               takes nothing unless transfers are to be counted, and then each replica of the stage after it
               takes its share; a stage must fit into memory with the micro-batches that are in flight
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from pipeline.ideals import State

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Sums between states.

    Attributes:
        seconds: Computing time of what lies between, infinite where it is no stage.
        parameter_bytes: Its parameters.
        activation_bytes: Its outputs, all of them.
        boundary_bytes: For each state, what crosses its boundary.
        counted_bytes: The same as the original code counts it.
    """

    seconds: Array
    parameter_bytes: Array
    activation_bytes: Array
    boundary_bytes: Array
    counted_bytes: Array

    @staticmethod
    def of(cut_at: Sequence[State]) -> Cuts:
        """The sums between the given states."""

        def between(values: Sequence[float]) -> Array:
            totals: Array = np.array(values)
            before: Array = np.concatenate([[0.0], totals])
            difference: Array = totals[None, :] - before[:, None]
            return difference

        inside = np.array(
            [
                [True] * len(cut_at),
                *([a.nodes < b.nodes for b in cut_at] for a in cut_at),
            ]
        )
        return Cuts(
            np.where(inside, between([s.seconds for s in cut_at]), np.inf),
            np.where(inside, between([s.parameter_bytes for s in cut_at]), 0.0),
            np.where(inside, between([s.activation_bytes for s in cut_at]), 0.0),
            np.array([s.boundary_bytes for s in cut_at]),
            np.array([s.counted_bytes for s in cut_at]),
        )


class CostModel(ABC):
    """Costs at one level of the topology."""

    def __init__(
        self,
        cuts: Cuts,
        compute: Array,
        *,
        machines: int,
        within: int,
        bandwidth: float,
        memory_bytes: float | None = None,
        compression: float | None = None,
    ) -> None:
        """Costs for `machines` machines, each of which does a part of the model in `compute` seconds.

        Args:
            cuts: Sums between states.
            compute: Seconds of each part on one machine of this level.
            machines: Machines of this level.
            within: Machines of the level below in one of them.
            bandwidth: Bytes per second between them.
            memory_bytes: What a device has, when it is to be checked.
            compression: What transfers are divided by, when they are to be counted.
        """
        self.cuts, self.compute, self.machines, self.within = cuts, compute, machines, within
        self.bandwidth, self.memory_bytes, self.compression = bandwidth, memory_bytes, compression

    @abstractmethod
    def alone(self, replicas: int) -> Array:
        """Time of a stage that starts a pipeline."""

    @abstractmethod
    def last(self, replicas: int, machines: int) -> Array:
        """Time of a stage that ends a pipeline on `machines` machines in all."""

    @abstractmethod
    def transfer_in(self, replicas: int) -> Array:
        """For each state, time of a cut there, before a stage with so many replicas."""

    @abstractmethod
    def transfer_out(self, replicas: int) -> Array:
        """For each state, time of the cut there, after a stage with so many replicas."""


class PaperCostModel(CostModel):
    """As printed. Source: PipeDream, section 2.4.1."""

    def alone(self, replicas: int) -> Array:  # noqa: D102
        synchronise = 2 * (replicas - 1) * self.cuts.parameter_bytes / self.bandwidth
        return np.asarray(np.maximum(self.compute, synchronise) / replicas)

    def last(self, replicas: int, machines: int) -> Array:  # noqa: D102
        return self.alone(replicas)

    def transfer_in(self, replicas: int) -> Array:  # noqa: D102
        return 2 * self.cuts.boundary_bytes / self.bandwidth

    def transfer_out(self, replicas: int) -> Array:  # noqa: D102
        return np.zeros_like(self.cuts.boundary_bytes)


class OriginalCostModel(CostModel):
    """As the published optimizer counts.

    Source: msr-fiddle/pipedream, optimizer/optimizer_graph_hierarchical.py.
    """

    def alone(self, replicas: int) -> Array:  # noqa: D102
        synchronise = 4 * (replicas - 1) * self.cuts.parameter_bytes / (self.bandwidth * replicas)
        time = (self.compute + synchronise / self.within) / replicas
        return self._fitting(time, ceil((self.machines - replicas) / replicas))

    def last(self, replicas: int, machines: int) -> Array:  # noqa: D102
        synchronise = 4 * (replicas - 1) * self.cuts.parameter_bytes / (self.bandwidth * replicas)
        time = (self.compute + synchronise) / replicas
        return self._fitting(time, ceil((self.machines - machines) / replicas))

    def transfer_in(self, replicas: int) -> Array:  # noqa: D102
        if self.compression is None:
            return np.zeros_like(self.cuts.counted_bytes)
        return 2 * self.cuts.counted_bytes / (self.bandwidth * replicas) / self.compression

    def transfer_out(self, replicas: int) -> Array:  # noqa: D102
        out = self.transfer_in(replicas)
        out[-1] = 0.0
        return out

    def _fitting(self, time: Array, in_flight: int) -> Array:
        """Infinite where weights and outputs of the micro-batches in flight do not fit."""
        if self.memory_bytes is None:
            return time
        stashed = in_flight * (self.cuts.activation_bytes + self.cuts.parameter_bytes)
        return np.where(stashed > self.memory_bytes, np.inf, time)


COST_MODELS: dict[str, type[CostModel]] = {"paper": PaperCostModel, "original": OriginalCostModel}
"""The cost models by name."""
