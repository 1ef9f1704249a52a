"""A backward pass of the real engine that stops where it calls the user.

In:  a call that runs the backward pass.
Out: its result, or a `CalledBack`; in that case the engine waits until the pass is told to go on.

The engine runs on a thread of its own, or on those of CUDA devices. Only one side runs at a time, so the two
share what they like without locks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from coexec.tracegraph.ambient import restored
from coexec.tracegraph.callbacks import CalledBack

Contexts = Sequence[AbstractContextManager[Any]]


class SteppedBackward:
    """One backward pass."""

    def __init__(self) -> None:
        self._to_program: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._to_engine: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()  # devices have threads each
        self._abandoned = False

    def start(self, run: Callable[[], Any], state: Hashable, contexts: Contexts) -> Any:
        """Begins the pass.

        Args:
            run: runs the whole pass.
            state: the ambient state that it runs under.
            contexts: what to enter besides, on the engine's thread.
        """
        threading.Thread(
            target=self.run, args=(run, state, contexts), name="coexec backward", daemon=True
        ).start()
        return self._wait()

    def run(self, run: Callable[[], Any], state: Hashable, contexts: Contexts) -> None:
        """Runs the pass, on a thread of its own."""
        outcome: tuple[Any, BaseException | None]
        try:
            with restored(state), ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                outcome = (run(), None)
        except BaseException as e:
            outcome = (None, e)
        self._to_program.put(outcome)

    def go_on(self, returned: Any) -> Any:
        """Gives the engine what a callback returned."""
        self._to_engine.put((returned, None))
        return self._wait()

    def throw(self, error: BaseException) -> None:
        """Raises in the engine what a callback raised, which ends the pass."""
        self._abandoned = True
        self._to_engine.put((None, error))
        try:
            while self._wait().__class__ is CalledBack:
                self._to_engine.put((None, error))
        except BaseException as e:
            if e is not error:
                raise

    def call_back(self, call: CalledBack) -> Any:
        """Stops the engine, on one of its threads, until the program has made a call."""
        with self._one_at_a_time:
            if self._abandoned:
                raise RuntimeError("the backward pass was given up")
            self._to_program.put((call, None))
            returned, error = self._to_engine.get()
        if error is not None:
            raise error
        return returned

    def _wait(self) -> Any:
        try:
            answer, error = self._to_program.get()
        except BaseException:  # an interrupt: nobody will come back for the engine
            self._abandoned = True
            self._to_engine.put((None, RuntimeError("the backward pass was given up")))
            raise
        if error is not None:
            raise error
        return answer
