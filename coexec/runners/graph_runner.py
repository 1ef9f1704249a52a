"""The GraphRunner: executes the program of an iteration beside Python.

`GraphRunner` is the interface that `interpreter.InterpretedRunner` (the reference) and
`native.NativeRunner` implement; `make_graph_runner` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from coexec._native import core
from coexec.runners.interpreter import InterpretedRunner
from coexec.tracegraph.program import Program


class GraphRunner(Protocol):
    """One iteration at a time: begin, then sends and fetches, then commit and wait, or cancel; finish."""

    def begin(self, program: Program, captured: Sequence[torch.Tensor], start: bool) -> None:
        """Starts an iteration; without `start`, only the first fetch or the commit does."""

    def send(self, message: Any) -> None:
        """Feeds a tensor or number, or tells which case was taken."""

    def bind(self, symbol: int, value: int) -> None:
        """Tells what a symbol in sizes is in this iteration."""

    def bound(self, symbol: int) -> int | None:
        """What a symbol is, None if it is not known yet."""

    def fetch(self, slot: int) -> Any:
        """Waits for the value of a fetch slot."""

    def commit(self) -> None:
        """Lets the calls run that were put off until the iteration is valid."""

    def wait_for_commit(self) -> bool:
        """Waits until calls that were put off begin to run; returns whether that is known before the end."""

    def wait(self) -> None:
        """Waits for the end and raises what failed."""

    def join(self) -> None:
        """Waits for the end, whatever it is, and cannot be interrupted."""

    def wait_for_draws(self) -> bool:
        """Waits until no more random numbers will be drawn; returns whether the iteration still runs."""

    def cancel(self) -> None:
        """Gives the iteration up; returns when nothing of it runs any more."""

    def committing(self) -> bool:
        """Whether calls that were put off to the commit have begun to run."""

    def finish(self) -> None:
        """Drops all values."""

    def value(self, register: int) -> Any:
        """The value of a kept register after the end."""

    def times(self) -> Sequence[float]:
        """Seconds computed and waited, over all iterations."""

    def record_spans(self, on: bool) -> None:
        """Lets the runner keep when it executes and when it waits, or stops that."""

    def take_spans(self) -> Sequence[tuple[float, float, bool]]:
        """Begin and end (by `time.perf_counter`) of each execution and wait, and whether it was a wait."""


def make_graph_runner() -> GraphRunner:
    """The native GraphRunner, or the interpreted one where it was not built."""
    if core is None:
        return InterpretedRunner()
    from coexec.runners.native import NativeRunner

    return NativeRunner()
