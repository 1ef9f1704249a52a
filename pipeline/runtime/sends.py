"""Lets go of what has been sent as soon as it has arrived.

In:  messages that a rank has started to send and doesn't wait for.
Out: their tensors are freed when the peer has them; the first failure is kept for whoever asks.

gloo tells that a send has completed only to whoever waits for it, so a thread does that, in order. It spends
its time blocked outside of Python.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event, Thread

from pipeline.runtime.channels import Pending
from pipeline.runtime.errors import RunError


class Sends:
    """Sends on their way, and the thread that waits for them; `close` ends it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Pending | Event | None] = SimpleQueue()
        self._failure: RunError | None = None
        self._closed = False
        self._thread = Thread(target=self._work, name="pipeline-sends", daemon=True)
        self._thread.start()

    def add(self, pending: Pending) -> None:
        """Wait for a send in the background."""
        self._queue.put(pending)

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait until everything has arrived; each send has its own time limit.

        Raises:
            RunError: Something hasn't.
        """
        done = Event()
        self._queue.put(done)
        done.wait()
        self.check()

    def close(self) -> None:
        """End the thread, once the send that it waits for has arrived or its time is over."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.set()
            elif self._failure is None and not self._closed:
                try:
                    item.wait()
                except RunError as error:
                    self._failure = RunError(f"{item.action}: {error}")
            del item
