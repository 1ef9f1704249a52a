"""A contender in a process of its own: its memory and its compilers' state are no other's.

The process waits for orders over a pipe, so that only one contender works at a time.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.modes import Run
from bench.peers import count_compilations
from bench.records import resident_mb
from bench.speed.contenders import Contender, Setup, start

if TYPE_CHECKING:
    from coexec import ProgramReport

RUNNER_TIMES = ("python_ms", "python_stall_ms", "graph_ms", "graph_stall_ms")
ENDING_S = 10.0
"""Seconds that a process may take to end by itself."""
PRELOADED = ["torch", "coexec", "bench.speed.worker", "bench.programs"]


class WorkerError(RuntimeError):
    """The contender failed, or its time was up; the message says how."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The time of steps in a row."""

    step_ms: tuple[float, ...]
    wait_ms: float
    """Until everything that the last step writes was written."""

    @property
    def mean_ms(self) -> float:
        """Milliseconds a step, everything written."""
        return (sum(self.step_ms) + self.wait_ms) / len(self.step_ms)


@dataclass(frozen=True, slots=True)
class Order:
    """What the process is to do: take steps, or (with none) tell the facts and end."""

    steps: int
    measured: bool


class Worker:
    """The side that gives the orders."""

    def __init__(self, contender: Contender, setup: Setup) -> None:
        # Forked from a server that has imported torch and never run it: threads do not survive a fork.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender, setup), daemon=True)
        self._process.start()
        theirs.close()

    def take(self, steps: int, *, measured: bool, timeout_s: float | None = None) -> Steps:
        """Let it take steps.

        Raises:
            WorkerError: if that fails or takes longer than `timeout_s`; the process is ended.
        """
        taken: Steps = self._ask(Order(steps, measured), timeout_s)
        return taken

    def facts(self) -> dict[str, Any]:
        """Return what else is to be told of the run, and end it.

        Raises:
            WorkerError: if that fails.
        """
        facts: dict[str, Any] = self._ask(Order(0, False), None)
        self._process.join(ENDING_S)
        self.end()
        return facts

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _ask(self, order: Order, timeout_s: float | None) -> Any:
        try:
            self._connection.send(order)
            if not self._connection.poll(timeout_s):
                raise WorkerError(f"not done after {timeout_s:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            answer = WorkerError(f"its process died with exit status {self._process.exitcode}")
        except WorkerError as error:
            answer = error
        if isinstance(answer, WorkerError):
            self.end()
            raise answer
        return answer


def _serve(connection: Connection, contender: Contender, setup: Setup) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(setup.threads)
    try:
        observed = _Observed(start(contender, setup))
        observed.run.random.restore()
        while (order := connection.recv()).steps:
            if order.measured:
                observed.begin_measured()
            connection.send(_take(observed.run, order.steps))
        connection.send(observed.facts())
    except EOFError:
        return
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        connection.send(WorkerError(f"{type(error).__name__}: {lines[0]}"))


def _take(run: Run, steps: int) -> Steps:
    step_ms = []
    for _ in range(steps):
        began = time.perf_counter()
        run.training.step(run.tape)
        step_ms.append((time.perf_counter() - began) * 1e3)
        run.steps += 1
        if run.steps % run.training.steps_per_epoch == 0:
            run.training.end_epoch()
    began = time.perf_counter()
    next(run.training.model.parameters()).detach().view(-1)[0].item()  # co-execution and the GPU end here
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return Steps(tuple(step_ms), (time.perf_counter() - began) * 1e3)


class _Observed:
    """A run, and what is to be told of it at the end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.base_mb = resident_mb()
        self.measures = False
        self.peak_before_mb: float | None = None
        self._phases_before: Counter[str] = Counter()
        self._samples_before: dict[str, int] = {}

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
            facts |= {"graph_breaks": counts.graph_breaks, "recompilations": counts.recompilations}
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
