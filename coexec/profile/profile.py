"""Profile: records the timeline of the iterations that run while it is entered.

In:  iterations of any tape of this thread.
Out: a `Timeline`.

Python's waits are timed by wrapping the methods through which it waits; the GraphRunner's thread keeps
its own spans, by the same clock (`time.perf_counter` and C++'s `steady_clock` are one). Both are taken
off again at the end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from coexec.errors import TapeError
from coexec.profile.picture import draw_timeline
from coexec.profile.timeline import IterationSpan, Span, Timeline, clipped, lane
from coexec.profile.trace_events import write_trace
from coexec.program_state import Phase, ProgramState
from coexec.runners.pending import settle_all

#: What Python waits for in each method of a GraphRunner, and of the queue of the dynamic phase.
_RUNNER_WAITS = {
    "fetch": "fetch",
    "wait_for_commit": "end of the block",
    "wait": "end of the block",
    "join": "use of a result",
    "cancel": "fallback",
}
_QUEUE_WAITS = {"wait": "fetch", "drain": "empty queue"}

_local = threading.local()


def active_profile() -> Profile | None:
    """The profile that this thread has entered."""
    return getattr(_local, "profile", None)


class Profile:
    """A context manager around the iterations to record; see `GradientTape.profile`.

    Args:
        folder: where `timeline.json` and `timeline.png` are written at the end; None writes nothing.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._timeline: Timeline | None = None
        self._iterations: list[IterationSpan] = []
        self._waits: list[Span] = []
        self._sources: dict[int, tuple[str, Any]] = {}  # what keeps spans, by id, and its program
        self._restore: list[Callable[[], None]] = []

    @property
    def timeline(self) -> Timeline:
        """What was recorded.

        Raises:
            TapeError: if the profile has not ended.
        """
        if self._timeline is None:
            raise TapeError("the timeline is there when the profile's with block has ended")
        return self._timeline

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `timeline.json` (Chrome trace events; open it in ui.perfetto.dev) and `timeline.png`.

        Args:
            folder: is made if it is not there.

        Raises:
            TapeError: if no iteration was recorded.
            ImportError: if matplotlib is not installed (`pip install coexec[draw]`); the JSON is
                written all the same.
        """
        if not self.timeline.iterations:
            raise TapeError("no iteration ran inside of the profile; enter it around the training loop")
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        write_trace(self.timeline, path / "timeline.json")
        draw_timeline(self.timeline, path / "timeline.png")

    def __enter__(self) -> Profile:
        if active_profile() is not None:
            raise TapeError("a profile is running already")
        if self._timeline is not None:
            raise TapeError("this profile has ended; make a new one")
        settle_all()
        _local.profile = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        settle_all()
        _local.profile = None
        try:
            self._timeline = self._made()
        finally:
            for restore in reversed(self._restore):
                restore()
        if self._folder is not None and error is None:
            self.save(self._folder)

    # --- called by the tape ---

    def begin(self, state: ProgramState) -> Callable[[str], None]:
        """An iteration is about to begin; the result is called with its phase when Python has left it."""
        if state.phase is Phase.COEXECUTION:
            self._watch(state.key, state.graph_runner, state.graph_runner, _RUNNER_WAITS)
        elif state.phase is Phase.DYNAMIC and id(state.table.queue) not in self._sources:
            table, queue = state.table, state.table.queue
            timed = _Stand(queue)
            table.queue = timed
            self._restore.append(lambda: setattr(table, "queue", queue))
            self._watch(state.key, timed, queue, _QUEUE_WAITS)
        number, began = state.iteration, time.perf_counter()

        def end(phase: str) -> None:
            self._iterations.append(IterationSpan(state.key, number, phase, began, time.perf_counter()))

        return end

    # --- recording ---

    def _watch(self, key: str, owner: Any, source: Any, waits: dict[str, str]) -> None:
        """Times the waiting methods of `owner`, and lets `source` keep spans."""
        if id(owner) in self._sources:
            return
        self._sources[id(owner)] = (key, source)
        source.record_spans(True)
        self._restore.append(lambda: source.record_spans(False))
        for method, name in waits.items():
            own = vars(owner).get(method)
            setattr(owner, method, self._timed(getattr(owner, method), name))
            self._restore.append(_putting_back(owner, method, own))

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self._waits.append(Span(began, time.perf_counter(), True, name))

        return timed

    def _made(self) -> Timeline:
        start = self._iterations[0].begin_s if self._iterations else 0.0
        iterations = tuple(
            IterationSpan(i.key, i.number, i.phase, i.begin_s - start, i.left_s - start)
            for i in self._iterations
        )
        blocks = [Span(i.begin_s, i.left_s, False, i.title) for i in iterations]
        waits = [Span(w.begin_s - start, w.end_s - start, True, w.name) for w in self._waits]
        graph = {}
        for key in dict.fromkeys(key for key, _ in self._sources.values()):
            raw = [
                Span(begin - start, end - start, waited, "waits for Python" if waited else "executes")
                for k, source in self._sources.values()
                if k == key
                for begin, end, waited in source.take_spans()
            ]
            windows = [(i.begin_s, i.left_s) for i in iterations if i.key == key]
            stalls = clipped((s for s in raw if s.stalled), windows)  # between iterations it is idle
            graph[key] = lane((s for s in raw if not s.stalled), stalls)
        return Timeline(iterations, lane(blocks, waits), graph)


class _Stand:
    """Stands in for an object whose methods cannot be replaced."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _putting_back(owner: Any, method: str, own: Any) -> Callable[[], None]:
    """Undoes the replacement of a method; `own` is what the object had, or None if its class has it."""
    if own is None:
        return lambda: delattr(owner, method)
    return lambda: setattr(owner, method, own)
