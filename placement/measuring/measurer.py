"""Measurer: what segments cost, from the log or measured now.

In:  a Segment and backends.
Out: a Measurement each, and the compiled functions, so that what is chosen need not be compiled again.

All backends of a segment are measured in one comparison, against each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from placement.backends.base import Backend, Run
from placement.graph import OpGraph, spec_of
from placement.measuring.child import ChildProcess
from placement.measuring.conditions import machine
from placement.measuring.log import CostLog, Key
from placement.measuring.protocol import Measurement, Protocol, measure
from placement.measuring.trial import Trial, attempt, refused
from placement.segments import Segment, cut, key_of
from placement.values import Examples

log = logging.getLogger(__name__)


@dataclass
class Spent:
    """Where the time of a search went, in seconds."""

    compiling_s: float = 0.0
    measuring_s: float = 0.0
    measured: int = 0
    from_log: int = 0


@dataclass
class Measurer:
    """Costs of the segments of one graph."""

    graph: OpGraph
    examples: Examples
    costs: CostLog
    protocol: Protocol
    timeout_s: float = 60.0
    """How long a backend may take for a segment in a child process."""
    spent: Spent = field(default_factory=Spent)
    _keys: dict[int, str] = field(default_factory=dict)
    _versions: dict[str, str] = field(default_factory=dict)
    _children: dict[str, ChildProcess] = field(default_factory=dict)
    _segments: dict[int, Segment] = field(default_factory=dict)
    _runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    _failed: dict[tuple[str, str], Measurement] = field(default_factory=dict)

    def segment(self, mask: int) -> Segment:
        """The segment of a set of operations."""
        if mask not in self._segments:
            self._segments[mask] = cut(self.graph, mask)
        return self._segments[mask]

    def key(self, backend: Backend, mask: int) -> Key:
        """What a cost is logged under."""
        if mask not in self._keys:
            self._keys[mask] = key_of(self.graph, mask)
        return self.context_key(backend, self._keys[mask])

    def context_key(self, backend: Backend, name: str) -> Key:
        """The key of something that is measured in this context, by its hash or name."""
        if backend.name not in self._versions:
            self._versions[backend.name] = backend.version_key()
        device = torch.device(spec_of(self.graph.ops[0].results[0]).device).type
        threads = torch.get_num_threads()
        return Key(
            name, backend.name, self._versions[backend.name], threads, machine(device), self.protocol.clock
        )

    def known(self, backend: Backend, mask: int) -> Measurement | None:
        """What the log has, or what a backend refuses without being tried."""
        found = self.costs.get(self.key(backend, mask))
        if found is not None:
            self.spent.from_log += 1
            return found
        return refused(backend, self.segment(mask))

    def measure(
        self, mask: int, backends: Sequence[Backend], deadline: float = float("inf")
    ) -> dict[str, Measurement]:
        """Measures a segment on backends, against each other, and logs it.

        Backends whose turn to compile comes after the deadline (of `time.perf_counter`) are left out.
        """
        if time.perf_counter() > deadline:
            return {}
        segment = self.segment(mask)
        results: dict[str, Measurement] = {}
        runs: dict[str, Run] = {}
        inputs = self.examples.inputs(segment)
        for backend in backends:
            if time.perf_counter() > deadline:
                break
            trial = self._trial(backend, segment, inputs)
            if trial.run is None:
                assert trial.failure is not None
                results[backend.name] = trial.failure
            else:
                runs[backend.name] = trial.run
        started = time.perf_counter()
        names = list(runs)
        for name, result in zip(names, self._compare([runs[n] for n in names], inputs), strict=True):
            results[name] = result
        self.spent.measuring_s += time.perf_counter() - started
        self.spent.measured += len(results)
        for backend in (b for b in backends if b.name in results):
            self.costs.put(self.key(backend, mask), results[backend.name], segment.title)
        return results

    def _compare(self, runs: list[Run], inputs: list[torch.Tensor]) -> list[Measurement]:
        if not runs:
            return []
        calls: list[Callable[[], object]] = [_bind(run, inputs) for run in runs]
        return measure(calls, self.protocol)

    def run(self, backend: Backend, mask: int) -> Run:
        """The compiled and verified function of a segment.

        Raises:
            RuntimeError: if the backend can't run it.
        """
        segment = self.segment(mask)
        known = self._runs.get((backend.name, mask))
        if known is not None:
            return known
        trial = self._trial(backend, segment, self.examples.inputs(segment))
        if trial.run is None:
            assert trial.failure is not None
            raise RuntimeError(f"{backend.name} {trial.failure.status}: {trial.failure.detail}")
        return trial.run

    def _trial(self, backend: Backend, segment: Segment, inputs: list[torch.Tensor]) -> Trial:
        started = time.perf_counter()
        try:
            known = self._runs.get((backend.name, segment.mask))
            if known is not None:
                return Trial(known)
            failure = self._failed.get((backend.name, segment.key))
            if failure is None and backend.isolate:
                failure = self._in_child(backend, segment, inputs)
            if failure is None:
                trial = attempt(backend, segment, inputs, segment.module(*inputs))
                if trial.run is not None:
                    self._runs[backend.name, segment.mask] = trial.run
                    return trial
                failure = trial.failure
            assert failure is not None
            self._failed[backend.name, segment.key] = failure
            level = logging.DEBUG if failure.status == "unsupported" else logging.WARNING
            log.log(level, "%s on %s: %s: %s", backend.name, segment.title, failure.status, failure.detail)
            return Trial(None, failure)
        finally:
            self.spent.compiling_s += time.perf_counter() - started

    def _in_child(self, backend: Backend, segment: Segment, inputs: list[torch.Tensor]) -> Measurement | None:
        if type(backend).__module__ == "__main__":
            log.warning(
                "%s is defined in the main script, which a child process cannot import: a crash of it will "
                "end this process. Move it to a module of its own.",
                type(backend).__name__,
            )
            return None
        if backend.name not in self._children:
            self._children[backend.name] = ChildProcess(backend, self.timeout_s)
        return self._children[backend.name].attempt(segment, inputs)

    def close(self) -> None:
        """Ends the child processes."""
        for child in self._children.values():
            child.close()
        self._children.clear()


def _bind(run: Run, inputs: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: run(*inputs)
