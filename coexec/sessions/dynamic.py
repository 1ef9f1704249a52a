"""An iteration whose calls are sent to a queue one by one."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from coexec._private import enter, leave
from coexec.block_watch import BlockWatch, Watched
from coexec.dynamic.runner import DynamicRunner
from coexec.options import Options
from coexec.program_state import Phase, ProgramState
from coexec.sessions.session import Session, made_in


class DynamicSession(Session):
    """An iteration of the dynamic phase."""

    phase = Phase.DYNAMIC.value

    def __init__(self, state: ProgramState, options: Options) -> None:
        super().__init__(state)
        self._queue = state.table.queue
        self._queue_times = tuple(self._queue.times())
        self._sent = state.table.sender.count()
        self.runner = DynamicRunner(state.table, lazy=options.mode == "lazy")
        self._watch = BlockWatch(self._called, state.updates.make)
        enter(self._watch)
        enter(self.runner)

    def _called(self, kind: Watched, name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        if kind is Watched.KEEPS:
            return self.runner.suspended()
        self.runner.synchronize()
        return made_in(kind)

    def end(self, error: BaseException | None) -> None:  # noqa: D102  # as in the base class
        leave(self.runner)
        leave(self._watch)
        self.state.running = False
        self.state.steps["dynamic"] += 1
        self.runner.synchronize()
        sent = self.state.table.sender.count() - self._sent
        seconds = time.perf_counter() - self._began
        self.state.ran_dynamically(sent, self.runner.waits, seconds)
        self._record_times(seconds, self._queue_times, self._queue.times(), self.runner.stall_s)
        self.runner.come_apart()
        self._come_apart("runner", "_watch")
