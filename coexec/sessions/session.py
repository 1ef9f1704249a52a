"""What all sessions have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from coexec._native import core
from coexec._private import without_own_modes
from coexec.block_watch import Watched
from coexec.program_state import ProgramState

#: Why there is no trace of an iteration that makes such calls.
IN_NO_TRACE = {Watched.RANDOM: "CX0118", Watched.COMPILES: "CX0102"}


class OwnMemory:
    """Keeps what the current thread frees, and hands it out again, until it is closed.

    Whatever a recorder remembers is allocated between tensors that come and go. malloc would put it into the
    memory of freed ones, which then have no room for the next: twice as much memory and more. Closing it once
    more does nothing, as all of it without the native module.
    """

    def __init__(self) -> None:
        self._keeps: Any = None
        if core is not None:
            core.begin_keeping()
            self._keeps = core.BorrowsMemory()

    def close(self) -> None:
        """Gives back all that is not in use."""
        if self._keeps is not None:
            self._keeps = None
            core.give_memory_back()


def made_in(kind: Watched) -> AbstractContextManager[None]:
    """The context in which a watched call is made."""
    return without_own_modes() if kind is Watched.COMPILES else nullcontext()


class Session:
    """What runs between a tape's entry and its exit."""

    phase: str

    def __init__(self, state: ProgramState) -> None:
        self.state = state
        self._began = time.perf_counter()

    def end(self, error: BaseException | None) -> None:
        """Ends the iteration; `error` is what leaves the block."""
        raise NotImplementedError

    def _come_apart(self, *parts: str) -> None:
        """Drops attributes that refer back: with these, frames and tensors would be left to the collector."""
        for part in parts:
            vars(self).pop(part, None)

    def _record_times(
        self, total: float, before: Sequence[float], after: Sequence[float], stall_s: float
    ) -> None:
        state = self.state
        busy, stalled = (now - then for now, then in zip(after, before, strict=True))
        state.python_ms.append((total - stall_s) * 1e3)
        state.python_stall_ms.append(stall_s * 1e3)
        state.graph_ms.append(busy * 1e3)
        state.graph_stall_ms.append(stalled * 1e3)
