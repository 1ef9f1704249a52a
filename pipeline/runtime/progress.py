"""Where each rank is, in a file that outlives it.

In:  a rank's runs and actions.
Out: two numbers in a memory-mapped file, to be read by whoever wants to know what a dead rank was doing.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from pipeline.actions import Action

_NUMBERS = struct.Struct("qq")


class Progress:
    """Writes the run and the index of the action that a rank is at."""

    def __init__(self, path: Path) -> None:
        """Start at run 0, before the first action."""
        path.write_bytes(_NUMBERS.pack(0, -1))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _NUMBERS.size)
        self._run = 0
        self._last = -1

    def __call__(self, index: int, action: Action) -> None:
        """The rank comes to an action; a smaller index than before means the next run."""
        self._run += index <= self._last
        self._last = index
        _NUMBERS.pack_into(self._map, 0, self._run, index)


def read_progress(path: Path) -> tuple[int, int]:
    """The run, counted from 0, and the index of the action; run 0 and -1 before the first one."""
    try:
        run, index = _NUMBERS.unpack(path.read_bytes())
    except (OSError, struct.error):
        return 0, -1
    return run, index
