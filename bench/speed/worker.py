"""A contender in a process of its own: its memory and its compilers' state are no other's.

The process waits for orders over a pipe, so that only one contender works at a time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.modes import Run
from bench.speed.contenders import Contender, Setup, start
from bench.speed.observed import Observed

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
    if "TORCH_LOGS" not in os.environ:
        # What compilers warn of is in the counts of the record.
        torch._logging.set_logs(all=logging.ERROR)  # type: ignore[attr-defined]  # documented
    torch.set_num_threads(setup.threads)
    try:
        observed = Observed(start(contender, setup))
        if contender.mode.startswith("compile:"):
            observed.count_in_optimizers()
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
