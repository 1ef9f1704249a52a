"""The registry of programs: which state belongs to a tape.

In:  the frame in which the tape was entered, the user's key, the options that shape a program.
Out: the `ProgramState`, the same for every iteration of the program.
"""

from __future__ import annotations

import ctypes
import os
import threading
from types import CodeType, FrameType

from coexec import block_watch
from coexec._private import default_device, leave_own_modes
from coexec.options import Options
from coexec.program_state import ProgramState
from coexec.runners import pending

_states: dict[tuple[object, ...], ProgramState] = {}
_lock = threading.Lock()


def state_of(frame: FrameType, key: object, options: Options) -> ProgramState:
    """The state of the program that a tape in `frame` belongs to, new at first sight."""
    identity = (frame.f_code, frame.f_lasti, key, options.executor, default_device())
    with _lock:
        if identity not in _states:
            name = _name(frame.f_code, frame.f_lineno, key)
            _states[identity] = ProgramState(name, options, (frame.f_code, frame.f_lasti))
        return _states[identity]


def all_states() -> list[ProgramState]:
    """The states of all programs, in the order in which they were first run."""
    with _lock:
        return list(_states.values())


def reset() -> None:
    """Forgets all programs; the next iteration of each starts in the tracing phase."""
    pending.settle_all()
    with _lock:
        for state in _states.values():
            state.stop_compiling()
        _states.clear()


def _after_fork() -> None:
    """In a child process the threads of the GraphRunners are gone, and nobody can wait for their ends."""
    global _lock
    _lock = threading.Lock()
    pending.after_fork()
    block_watch.forget()
    leave_own_modes()
    for state in _states.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))
    _states.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=pending.settle_all, after_in_child=_after_fork)


def _name(code: CodeType, line: int, key: object) -> str:
    place = f"{os.path.basename(code.co_filename)}:{line}"
    return place if key is None else f"{place} [{key}]"
