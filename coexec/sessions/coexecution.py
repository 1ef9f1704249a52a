"""An iteration in which Python is the skeleton, and the GraphRunner computes.

In:  the state of a program with a graph.
Out: the effects of the iteration: the graph's, or eager's where it left the graph. Then it is a trace, too.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from coexec._private import enter, leave, without_current_modes
from coexec.block_watch import INIT_GROUP, ZERO_GRAD, BlockWatch, Watched
from coexec.callbacks.iteration import Callbacks
from coexec.errors import CommitError
from coexec.location import describe
from coexec.options import Options
from coexec.pace import Choice
from coexec.program_state import Phase, ProgramState
from coexec.reasons import Cause, cause
from coexec.runners.captures import Found
from coexec.runners.fallback import replay
from coexec.runners.iteration import Mismatch
from coexec.runners.optimizers import init_group, zero_grad
from coexec.runners.pending import Pending, guardable
from coexec.runners.python_runner import PythonRunner
from coexec.sessions.session import IN_NO_TRACE, OwnMemory, Session, made_in
from coexec.tracer.mode import TracingMode
from coexec.tracer.recorder import Recorder


class CoexecutionSession(Session):
    """An iteration of the co-execution phase."""

    def __init__(
        self,
        state: ProgramState,
        frame: FrameType,
        captured: Found,
        options: Options,
        way: Choice | None,
        before: Pending | None,
    ) -> None:
        super().__init__(state)
        assert state.skeleton is not None
        self._frame = frame
        self._recorder: Recorder | None = None
        self._memory: OwnMemory | None = None
        self._entered = False
        self._phase: str | None = None
        self._pending: Pending | None = None
        self._cause: Cause | None = None
        self._asynchronous = not options.synchronous and options.mode == "coexec"
        self._timed_way = None if self._asynchronous else way
        self._seconds = 0.0  # of Python in the block and its ends
        self._graph_runner = state.idle_graph_runner
        self._graph_times = tuple(self._graph_runner.times())
        if before is not None:
            before.lift()
        self._callbacks = Callbacks()
        self.runner = PythonRunner(
            state.skeleton,
            self._graph_runner,
            captured,
            frame,
            self._on_mismatch,
            self._callbacks,
            lazy=options.mode == "lazy" or way is Choice.LATE,
            exclusive=self._asynchronous,
            before=before,
        )
        shortcuts = {ZERO_GRAD: zero_grad, INIT_GROUP: init_group}
        self._watch = BlockWatch(
            self._called,
            state.updates.make,
            {name: functools.partial(made, self.runner) for name, made in shortcuts.items()},
            self._callbacks,
            orders_draws=True,
        )
        self._callbacks.mode, self._callbacks.give_up = self.runner, self.runner.give_up
        self._callbacks.hooked_leaves = self.runner.hooked_leaves
        enter(self._watch)
        enter(self.runner)

    @property
    def phase(self) -> str:  # type: ignore[override]  # it is known at the end
        """What the iteration has become."""
        return self._phase or ("fallback" if self.runner.fell_back else Phase.COEXECUTION.value)

    def _called(self, kind: Watched, name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Python is about to do something that no torch function shows."""
        self.runner.catch_up_or_fall_back()
        if kind in IN_NO_TRACE:
            self._give_up(Mismatch(IN_NO_TRACE[kind], name))
            assert self._recorder is not None
            self._recorder.fail(IN_NO_TRACE[kind], name)
        elif kind is Watched.TRANSFORMS or self.runner.holds_symbol(arguments):
            self._give_up(Mismatch("CX0102", name))
        return made_in(kind)

    def _give_up(self, mismatch: Mismatch) -> None:
        if not self.runner.fell_back:
            self.runner.fall_back(mismatch)

    def _on_mismatch(self, runner: PythonRunner, mismatch: Mismatch) -> Any:
        """Becomes a tracing session in the middle of the iteration."""
        self._cause = cause(mismatch.id, mismatch.detail, describe(runner.iteration.location))
        self._memory = OwnMemory()
        recorder = Recorder(self.state.identities)
        mode = TracingMode(recorder, self._frame, self._callbacks)
        self._callbacks.recorder = recorder
        if mismatch.id == "CX0114":  # what Python writes through NumPy no trace can hold
            recorder.fail(mismatch.id, mismatch.detail)
        with without_current_modes(), recorder:  # modes of the user have seen these calls, or never will
            replay(runner, recorder)
        if runner.entered:
            recorder.set_own_modes(2)
            enter(recorder)
            self._entered = True
        self._recorder = recorder
        return mode.run

    def end(self, error: BaseException | None) -> None:  # noqa: D102  # as in the base class
        try:
            self._end(error)
        finally:
            if self._pending is None:
                self._over()

    def _end(self, error: BaseException | None) -> None:
        if self._entered:
            leave(self._recorder)
        self.runner.leave()
        leave(self._watch)
        late: BaseException | None = None  # what the iteration before raises
        try:
            if not self.runner.fell_back:
                late = self._catch_up()
                left_by = error or late
                if left_by is not None:
                    raise Mismatch("CX0002", type(left_by).__name__)
                self.runner.validate()
        except Mismatch as mismatch:
            self._fall_back(mismatch)
        if self.runner.fell_back and self._recorder is None:
            self._broke_off()  # the replay raised, and that is what leaves the block
        elif self._recorder is not None:
            if error is not None:
                self._recorder.fail("CX0002", type(error).__name__)
            self._fell_back()
        elif self._asynchronous and self._may_go_on(bound := self.runner.bound()):
            self._go_on(bound)
        else:
            self._finish()
        if late is not None:
            raise late

    def _over(self) -> None:
        """Nothing of the iteration is used any more."""
        if self._memory is not None:
            self._memory.close()
        self._phase = self.phase
        self.runner.come_apart()
        self._callbacks.come_apart()
        self._come_apart("runner", "_watch", "_frame", "_recorder", "_pending")

    def _catch_up(self) -> BaseException | None:
        try:
            self.runner.catch_up()
        except Mismatch:
            raise
        except BaseException as e:  # this iteration has to end nevertheless
            return e
        return None

    def _fall_back(self, mismatch: Mismatch) -> None:
        """Makes the iteration eager after its end; what eager execution raises is raised here."""
        try:
            self.runner.fall_back(mismatch)
        except BaseException:
            self._broke_off()
            raise

    def _broke_off(self) -> None:
        """Counts an iteration that eager execution could not repeat without an error."""
        self._ended()
        self.state.steps["fallback"] += 1
        if self._cause is not None:
            self.state.note(self._cause)

    def _may_go_on(self, bound: list[torch.Tensor]) -> bool:
        """Whether Python can leave the block before the GraphRunner is done, and has a reason to."""
        if self.runner.holds_random_state() or not self.runner.exclusive:
            return False
        if not all(guardable(t) for t in bound):
            return False
        return self.runner.stalled(self._graph_runner.wait_for_draws)

    def _go_on(self, bound: list[torch.Tensor]) -> None:
        """Python leaves the block; whoever uses one of these tensors, or a result, first waits."""
        state = self.state
        self._ended()
        self._pending = state.pending = Pending(self._graph_runner, self._finish_late)
        self._pending.guard([*bound, *self.runner.held()], self.runner.announce())
        self._seconds += time.perf_counter() - self._began

    def _finish_late(self) -> bool:
        try:
            return self._finish()
        finally:
            self._over()

    def _finish(self) -> bool:
        """Waits for the GraphRunner, and gives Python the results; returns whether these are the graph's."""
        state = self.state
        if self._pending is not None:
            state.pending = None
            self._began = time.perf_counter()
        way = self.runner.way() if state.looks_for_ways else None
        try:
            self.runner.complete()
        except Mismatch as mismatch:
            if self._pending is not None:
                self._pending.abandon()
            self._fall_back(mismatch)
        except RuntimeError as e:
            raise CommitError(f"{e}; parameters may be half updated") from e
        finally:
            if self._recorder is None:
                self._graph_runner.finish()
                self.runner.forget()
                self._ended()
        if self._recorder is not None:
            self._fell_back()
            self.runner.raise_interrupt()
            return False
        state.steps["co-execution"] += 1
        self._seconds += time.perf_counter() - self._began
        if self._timed_way is not None:
            state.ran_on_the_graph(self._seconds, self._timed_way)
        self._record_times(self._seconds, self._graph_times, self._graph_runner.times(), self.runner.stall_s)
        state.coexecuted(way)
        self.runner.raise_interrupt()
        return True

    def _ended(self) -> None:
        """The block has been left, unless that has been noted before: the next one may be running."""
        if self._pending is None:
            self.state.running = False

    def _fell_back(self) -> None:
        state = self.state
        self._ended()
        state.steps["fallback"] += 1
        assert self._cause is not None
        assert self._recorder is not None
        trace = self._recorder.finish()
        state.fell_back(self._cause, trace, self._recorder.cause)
