"""An iteration that runs as it is, and is timed."""

from __future__ import annotations

import time

from coexec.program_state import Phase, ProgramState
from coexec.sessions.session import Session


class EagerSession(Session):
    """An iteration that runs eagerly, because that is faster or to see whether it is."""

    phase = Phase.EAGER.value

    def __init__(self, state: ProgramState, *, timed: bool) -> None:
        super().__init__(state)
        self._timed = timed

    def end(self, error: BaseException | None) -> None:  # noqa: D102  # as in the base class
        self.state.running = False
        self.state.steps["eager"] += 1
        if self._timed:
            self.state.ran_eagerly(time.perf_counter() - self._began)
