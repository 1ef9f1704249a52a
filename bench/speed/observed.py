"""What is to be told of a run beside its times: memory, compilations, phases, the runners' shares."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.modes import Run
from bench.peers import count_compilations
from bench.records import resident_mb

if TYPE_CHECKING:
    from coexec import ProgramReport

RUNNER_TIMES = ("python_ms", "python_stall_ms", "graph_ms", "graph_stall_ms")


class Observed:
    """A run, and what is to be told of it at the end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.base_mb = resident_mb()
        self.measures = False
        self._optimizer_breaks = 0
        self.peak_before_mb: float | None = None
        self._phases_before: Counter[str] = Counter()
        self._samples_before: dict[str, int] = {}

    def count_in_optimizers(self) -> None:
        """Count the graph breaks of the optimizers' steps apart: torch's own code has one in each."""

        def counted(step: Callable[..., Any]) -> Callable[..., Any]:
            def step_and_count(*args: Any, **kwargs: Any) -> Any:
                before = _graph_breaks()
                returned = step(*args, **kwargs)
                self._optimizer_breaks += _graph_breaks() - before
                return returned

            return step_and_count

        for optimizer in self.run.training.optimizers:
            optimizer.step = counted(optimizer.step)  # type: ignore[method-assign]

    def begin_measured(self) -> None:
        """Measured steps begin: from here on peaks and phases count."""
        if not self.measures:
            self.measures = True
            self._phases_before = self._phases()
            self._samples_before = {r.key: len(r.python_ms) for r in self._reports()}
            self.peak_before_mb = peak_resident_mb()
            reset_peak()

    def facts(self) -> dict[str, Any]:
        """Return fields of a `Result` and further ones."""
        reports = self._reports()
        steady = self._phases() - self._phases_before
        on_cpu = next(self.run.training.model.parameters()).device.type == "cpu"
        facts: dict[str, Any] = {
            "peak_rss_mb": peak_resident_mb(),
            "peak_rss_warm_up_mb": self.peak_before_mb,
            "base_rss_mb": self.base_mb,
            "peak_gpu_mb": None if on_cpu else torch.cuda.max_memory_allocated() / 1e6,
            "device": "cpu" if on_cpu else torch.cuda.get_device_name(),
            "losses": [loss for _, loss in self.run.training.logged],
        }
        if self.run.executor is None:
            counts = count_compilations()
            facts |= {
                "graph_breaks": counts.graph_breaks - self._optimizer_breaks,
                "optimizer_graph_breaks": self._optimizer_breaks,
                "recompilations": counts.recompilations,
            }
        if reports:
            facts |= {
                "traces": sum(r.traces for r in reports),
                "fallbacks": sum(r.fallbacks for r in reports),
                "coexec_share": steady["co-execution"] / max(steady.total(), 1),
                "phases": dict(steady),
                "compile_s": [s for r in reports for s in r.compile_s],
                **{name: self._median(reports, name) for name in RUNNER_TIMES},
            }
        return facts

    def _median(self, reports: list[ProgramReport], name: str) -> float | None:
        """The median of the measured steps."""
        samples = [ms for r in reports for ms in getattr(r, name)[self._samples_before.get(r.key, 0) :]]
        return statistics.median(samples) if samples else None

    def _phases(self) -> Counter[str]:
        return sum((Counter(r.steps) for r in self._reports()), Counter[str]())

    def _reports(self) -> list[ProgramReport]:
        if self.run.executor is None:
            return []
        import coexec

        return [p for p in coexec.explain().programs if p.key.endswith(f"[{self.run.key}]")]


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def peak_resident_mb() -> float:
    """Return the most memory that this process has held since `reset_peak`, in MB."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux: since the process began
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / 1e6


def reset_peak() -> None:
    """Begin a new peak, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
