"""GradientTape: one iteration of a program, traced or co-executed.

In:  a `with` block around one training step.
Out: the step's effects, equal to eager's.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch

from coexec import interrupts
from coexec._private import enter, foreign_modes, leave, without_current_modes, without_own_modes
from coexec.block_watch import INIT_GROUP, ZERO_GRAD, BlockWatch, Watched
from coexec.callbacks.iteration import Callbacks
from coexec.dynamic.runner import DynamicRunner
from coexec.errors import CommitError, TapeError
from coexec.location import describe
from coexec.options import Options, options
from coexec.pace import Choice
from coexec.profile.profile import Profile, active_profile
from coexec.program_state import Phase, ProgramState
from coexec.programs import state_of
from coexec.reasons import Cause, cause
from coexec.runners.fallback import replay
from coexec.runners.iteration import Mismatch
from coexec.runners.optimizers import init_group, zero_grad
from coexec.runners.pending import Pending, guardable, settle_all
from coexec.runners.python_runner import PythonRunner
from coexec.tracer.mode import TracingMode
from coexec.tracer.recorder import Recorder

_active = threading.local()

log = logging.getLogger(__name__)


class GradientTape:
    """Runs the block of its `with` statement, one iteration of a program, by co-execution.

    The first iterations run eagerly and are recorded; later ones run as a Python skeleton beside
    the compiled graph of the whole iteration. Results, side effects, exceptions and random numbers
    are those of eager PyTorch.

    A program is known by the place of its `with` statement in the source.

    Args:
        key: tells apart several uses of one place (different models trained by one function).
        executor: see `coexec.Options.executor`; None takes the default from `coexec.options`.
        mode: see `coexec.Options.mode`.
        synchronous: see `coexec.Options.synchronous`.
        check: see `coexec.Options.check`.

    Raises:
        OptionError: if an option has a value that it cannot have.

    Source: Terra's `TerraGradientTape` (section 3.3.1), for PyTorch.
    """

    def __init__(
        self,
        *,
        key: object = None,
        executor: str | None = None,
        mode: str | None = None,
        synchronous: bool | None = None,
        check: bool | None = None,
    ) -> None:
        self._options = options.replaced(executor=executor, mode=mode, synchronous=synchronous, check=check)
        self._key = key
        self._session: _Session | None = None
        self._profiled: Callable[[str], None] | None = None
        self._handlers: interrupts.Handlers = ()
        self._entered = False

    def __enter__(self) -> GradientTape:
        if self._entered:
            raise TapeError("this tape is in use; make a new GradientTape for each iteration")
        handlers = interrupts.put_off()
        try:
            self._enter(sys._getframe(1))
        except BaseException:
            interrupts.as_before(handlers)
            raise
        self._handlers = handlers
        return self

    def _enter(self, frame: FrameType) -> None:
        if getattr(_active, "depth", 0) or self._options.mode == "eager":
            settle_all()
        else:
            state = state_of(frame, self._key, self._options)
            profile = active_profile()
            settle_all(but=state.pending if _may_run_ahead(state, self._options) else None)
            self._profiled = None if profile is None else profile.begin(state)
            self._session = _begin(state, frame, self._options)
        self._entered = True
        _active.depth = getattr(_active, "depth", 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _active.depth -= 1
        self._entered = False
        session, self._session = self._session, None
        profiled, self._profiled = self._profiled, None
        handlers, self._handlers = self._handlers, ()
        try:
            if session is not None:
                session.end(error)
        finally:
            if profiled is not None:
                profiled("eager" if session is None else session.phase)
            interrupts.as_before(handlers)

    @staticmethod
    def profile(folder: str | os.PathLike[str] | None = None) -> Profile:
        """Records when both runners compute and when they wait, in the iterations of a `with` block.

            with coexec.GradientTape.profile("timeline"):
                for x, y in itertools.islice(loader, 3):
                    with coexec.GradientTape():
                        ...

        Args:
            folder: where `timeline.json` (Chrome trace events; open it in ui.perfetto.dev) and
                `timeline.png` are written at the end; None writes nothing.

        Returns:
            A context manager. After its end, its `timeline` has the same, `timeline.summary()` the
            medians, and `save(folder)` writes the files.

        Raises:
            TapeError: if an iteration is running: a profile goes around iterations.

        Source: the four kinds of time are those of Terra, figure 3.11.
        """
        if getattr(_active, "depth", 0):
            raise TapeError("profile() goes around iterations, not into one")
        return Profile(folder)

    def gradient(
        self,
        target: torch.Tensor | Sequence[torch.Tensor],
        sources: Any,
        output_gradients: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Gradients of the sum of `target` with respect to `sources`.

        Args:
            target: a tensor or several; each a scalar, unless `output_gradients` is given.
            sources: a tensor, or lists, tuples and dicts of tensors.
            output_gradients: gradients with respect to each target, of its shape.

        Returns:
            A gradient for each source, in the structure of `sources`; None where the target does
            not depend on the source.

        Raises:
            TapeError: if the tape's block is not running.
        """
        if not self._entered:
            raise TapeError("gradient() works inside of the tape's with block")
        leaves, structure = torch.utils._pytree.tree_flatten(sources)
        grads = torch.autograd.grad(target, leaves, output_gradients, allow_unused=True)
        return torch.utils._pytree.tree_unflatten(list(grads), structure)


def _begin(state: ProgramState, frame: FrameType, options: Options) -> _Session | None:
    if state.phase is Phase.EAGER:
        state.steps["eager"] += 1
        return None
    modes = foreign_modes()
    if modes or state.running:
        why = ("CX0113", f"{', '.join(modes)}") if modes else ("CX0119", "its previous iteration still runs")
        state.note(cause(*why, state.key))
        state.steps["eager"] += 1
        return None
    state.running = True
    before = state.pending
    if state.phase is Phase.DYNAMIC and not state.tries_tracing():
        if options.eager_if_faster and state.pace.next() is Choice.EAGER and _is_timed():
            return _EagerSession(state, timed=True)
        return _DynamicSession(state, options)
    if state.phase is Phase.COEXECUTION:
        state.take_compiled()
        state.narrow()
        state.settle()
        way = None
        if _may_choose(state, options):
            way = state.start.next() if options.synchronous else state.entered()
        if way is Choice.EAGER:
            if before is not None:
                before.settle()
            return _EagerSession(state, timed=options.synchronous)
        captured = state.captured_tensors()
        if captured is not None:
            return _CoexecutionSession(state, frame, captured, options, way, before)
        if before is not None:
            before.settle()
        state.lost_capture()
    return _TracingSession(state, frame)


def _may_run_ahead(state: ProgramState, options: Options) -> bool:
    """Whether the next iteration may begin while the one before is unfinished."""
    pending = state.pending
    return (
        pending is not None
        and pending.thread == threading.get_ident()
        and state.phase is Phase.COEXECUTION
        and not state.compiling
        and not state.narrows
        and not state.settles
        and not options.synchronous
        and options.mode == "coexec"
        and active_profile() is None
        and not foreign_modes()
    )


def _is_timed() -> bool:
    """Whether it can be seen in which way iterations are faster: a GPU's time is not Python's."""
    return not torch.cuda.is_initialized()


def _may_choose(state: ProgramState, options: Options) -> bool:
    """Whether iterations with a graph may run in several ways, to see which is the fastest."""
    ways = state.start.ways
    allowed = options.mode == "coexec" and (options.eager_if_faster or Choice.EAGER not in ways)
    return allowed and len(ways) > 1 and active_profile() is None and _is_timed()


#: Why there is no trace of an iteration that makes such calls.
_IN_NO_TRACE = {Watched.RANDOM: "CX0118", Watched.COMPILES: "CX0102"}


def _made_in(kind: Watched) -> AbstractContextManager[None]:
    """The context in which a watched call is made."""
    return without_own_modes() if kind is Watched.COMPILES else nullcontext()


class _Session:
    """What runs between a tape's entry and its exit."""

    phase: str

    def __init__(self, state: ProgramState) -> None:
        self.state = state
        self._began = time.perf_counter()

    def end(self, error: BaseException | None) -> None:
        """Ends the iteration; `error` is what leaves the block."""
        raise NotImplementedError

    def _come_apart(self, *parts: str) -> None:
        """Drops attributes that refer back: with these, frames and tensors would be left to the collector."""
        for part in parts:
            vars(self).pop(part, None)

    def _record_times(
        self, total: float, before: Sequence[float], after: Sequence[float], stall_s: float
    ) -> None:
        state = self.state
        busy, stalled = (now - then for now, then in zip(after, before, strict=True))
        state.python_ms.append((total - stall_s) * 1e3)
        state.python_stall_ms.append(stall_s * 1e3)
        state.graph_ms.append(busy * 1e3)
        state.graph_stall_ms.append(stalled * 1e3)


class _TracingSession(_Session):
    """An iteration of the tracing phase."""

    phase = Phase.TRACING.value

    def __init__(self, state: ProgramState, frame: FrameType) -> None:
        super().__init__(state)
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
        if kind in _IN_NO_TRACE:
            self.recorder.fail(_IN_NO_TRACE[kind], name)
        return _made_in(kind)

    def end(self, error: BaseException | None) -> None:
        leave(self.recorder)
        leave(self.mode)
        leave(self._watch)
        self.state.steps["tracing"] += 1
        self.state.running = False
        if error is not None:
            self.recorder.fail("CX0002", type(error).__name__)
        trace, why = self.recorder.finish(), self.recorder.cause
        self._callbacks.come_apart()
        self._come_apart("recorder", "mode", "_watch")
        self.state.traced(trace, why)


class _EagerSession(_Session):
    """An iteration that runs eagerly, because that is faster or to see whether it is."""

    phase = Phase.EAGER.value

    def __init__(self, state: ProgramState, *, timed: bool) -> None:
        super().__init__(state)
        self._timed = timed

    def end(self, error: BaseException | None) -> None:
        self.state.running = False
        self.state.steps["eager"] += 1
        if self._timed:
            self.state.ran_eagerly(time.perf_counter() - self._began)


class _DynamicSession(_Session):
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
        return _made_in(kind)

    def end(self, error: BaseException | None) -> None:
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


class _CoexecutionSession(_Session):
    """An iteration of the co-execution phase."""

    def __init__(
        self,
        state: ProgramState,
        frame: FrameType,
        captured: list[torch.Tensor | None],
        options: Options,
        way: Choice | None,
        before: Pending | None,
    ) -> None:
        super().__init__(state)
        assert state.skeleton is not None
        self._frame = frame
        self._recorder: Recorder | None = None
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
        if kind in _IN_NO_TRACE:
            self._give_up(Mismatch(_IN_NO_TRACE[kind], name))
            assert self._recorder is not None
            self._recorder.fail(_IN_NO_TRACE[kind], name)
        elif kind is Watched.TRANSFORMS or self.runner.holds_symbol(arguments):
            self._give_up(Mismatch("CX0102", name))
        return _made_in(kind)

    def _give_up(self, mismatch: Mismatch) -> None:
        if not self.runner.fell_back:
            self.runner.fall_back(mismatch)

    def _on_mismatch(self, runner: PythonRunner, mismatch: Mismatch) -> Any:
        """Becomes a tracing session in the middle of the iteration."""
        self._cause = cause(mismatch.id, mismatch.detail, describe(runner.iteration.location))
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

    def end(self, error: BaseException | None) -> None:
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
