"""Interrupts (Ctrl-C and other signals) that come while coexec is at work are put off until it is done.

In:  signals whose handlers may raise, while a block runs or an iteration is being finished.
Out: the same handlers, called when no function of coexec is on the stack, nor one that takes a mode off.

Python calls a handler between any two instructions of the main thread. An exception that is raised in the
middle of a tape's end would leave modes entered, or gradients that nobody sets; one that is raised while
PyTorch has taken a mode off for a call leaves the block without it. So another handler takes the place of
each of them for the time of a block: it looks at the stack, and where such code is at work it has the signal
sent once more a little later. What waits too long, or is interrupted a second time, is let go.
"""

from __future__ import annotations

# `signal` has the same functions, ten times slower: this is called in each iteration.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils._python_dispatch

#: Signals by which programs are asked to stop, and which time limits are made of.
SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name) and hasattr(signal, "pthread_kill")
)

#: Seconds until a signal that was put off is sent again.
AGAIN_S = 1e-3

#: Seconds that one is put off at most.
PATIENCE_S = 5.0

#: Code that is not to be interrupted: coexec, and what takes modes off for a call and puts them back.
_WHERE = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    str(torch.overrides.__file__),
    str(torch.utils._python_dispatch.__file__),
)

Handlers = tuple[tuple[int, "_StandIn"], ...]


class _StandIn:
    """A handler that calls another one, now or later."""

    __slots__ = ("_came", "_sent", "handler")

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self._came: float | None = None  # when the signal came that is put off
        self._sent = False  # whether it was sent again since

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._may_wait() and _at_work(frame) and self._waits(number):
            return
        self._came = None
        self.handler(number, frame)

    def _may_wait(self) -> bool:
        again, self._sent = self._sent, False
        return self._came is None or (again and time.monotonic() - self._came < PATIENCE_S)

    def _waits(self, number: int) -> bool:
        """Has the signal sent again; False where no thread can be started any more, as at Python's end."""
        self._came = self._came or time.monotonic()
        try:
            _thread.start_new_thread(self._send_again, (number,))
        except RuntimeError:
            return False
        return True

    def _send_again(self, number: int) -> None:
        time.sleep(AGAIN_S)
        if self._came is not None:
            self._sent = True
            signal.pthread_kill(_main_thread(), number)  # a wait that was begun since ends, too


def _at_work(frame: FrameType | None) -> bool:
    """Whether a function of coexec is on the stack, or one of PyTorch's that moves modes."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_WHERE):
            return True
        frame = frame.f_back
    return False


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None  # it runs
    return ident


def put_off() -> Handlers:
    """Takes the place of the handlers, if this is the main thread; `as_before` undoes it."""
    if threading.get_ident() != _main_thread():
        return ()
    placed: Handlers = ()
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler.__class__ is not _StandIn:
            stand_in = _StandIn(handler)
            _signal.signal(number, stand_in)
            placed = (*placed, (number, stand_in))
    return placed


def as_before(placed: Handlers) -> None:
    """Puts the handlers back, where nobody has set others."""
    for number, stand_in in placed:
        if _signal.getsignal(number) is stand_in:
            _signal.signal(number, stand_in.handler)
