"""An iteration that is recorded while it runs eagerly."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from coexec._private import enter, leave
from coexec.block_watch import BlockWatch, Watched
from coexec.callbacks.iteration import Callbacks
from coexec.program_state import Phase, ProgramState
from coexec.sessions.session import IN_NO_TRACE, OwnMemory, Session, made_in
from coexec.tracer.mode import TracingMode
from coexec.tracer.recorder import Recorder


class TracingSession(Session):
    """An iteration of the tracing phase."""

    phase = Phase.TRACING.value

    def __init__(self, state: ProgramState, frame: FrameType) -> None:
        super().__init__(state)
        self._memory = OwnMemory()
        self.recorder = Recorder(state.identities)
        self._callbacks = Callbacks()
        self.mode = TracingMode(self.recorder, frame, self._callbacks)
        self._callbacks.mode, self._callbacks.recorder = self.mode, self.recorder
        self._watch = BlockWatch(
            self._called, state.updates.make, callbacks=self._callbacks, orders_draws=True
        )
        enter(self._watch)
        enter(self.mode)
        enter(self.recorder)

    def _called(self, kind: Watched, name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        if kind in IN_NO_TRACE:
            self.recorder.fail(IN_NO_TRACE[kind], name)
        return made_in(kind)

    def end(self, error: BaseException | None) -> None:  # noqa: D102  # as in the base class
        leave(self.recorder)
        leave(self.mode)
        leave(self._watch)
        self._memory.close()
        self.state.steps["tracing"] += 1
        self.state.running = False
        if error is not None:
            self.recorder.fail("CX0002", type(error).__name__)
        trace, why = self.recorder.finish(), self.recorder.cause
        self._callbacks.come_apart()
        self._come_apart("recorder", "mode", "_watch")
        self.state.traced(trace, why)
