"""What one iteration knows of the code that autograd calls.

In:  calls of custom functions' `apply`, and backward passes, in a traced or co-executed block.
Out: the same through events (see `coexec.tracegraph.callbacks`), with the user's code run on the way.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import handle_torch_function
from torch.utils.hooks import RemovableHandle

from coexec._private import WithoutModes, alias_of, is_inmost
from coexec.callbacks.call import Call
from coexec.callbacks.checkpoint import Recomputation
from coexec.callbacks.context import is_documented
from coexec.callbacks.hook import Hook, LeafHook, stand_ins
from coexec.callbacks.stepped import SteppedBackward
from coexec.tracegraph import functions
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.callbacks import Applied, CalledBack, applied, entered, go_on, hooked, left

Function = torch.autograd.Function

#: Lets a backward pass go on with what the user returned, and returns what it returns then.
Advance = Callable[[Any], Any]


Callback = Call | Hook | LeafHook | Recomputation


class Mode(Protocol):
    """The function mode of the block."""

    def below(self, frame: FrameType) -> AbstractContextManager[None]:
        """Enters the mode again, for calls made below a frame."""


class Recorder(Protocol):
    """What callbacks need of `coexec.tracer.recorder.Recorder`."""

    cause: Any

    def known(self, tensor: torch.Tensor) -> Any:
        """What is known of a tensor object."""

    def know_as(self, tensor: torch.Tensor, known: Any) -> None:
        """Takes a tensor object for another name of one that is known."""

    def fail(self, id_: str, detail: str) -> None:
        """Gives the recording up."""

    def hooked_leaves(self) -> dict[int, torch.Tensor]:
        """External tensors with hooks, by what names them across traces."""

    def on_another_thread(self) -> AbstractContextManager[None]:
        """Records what another thread does."""


class Callbacks:
    """The code of the user that autograd calls in one iteration.

    Attributes:
        mode: the function mode that is active in the block.
        recorder: records the iteration, if it is traced or has fallen back.
        give_up: makes a co-executed iteration eager, for a reason.
        leaf: finds a leaf in a co-executed iteration, by what names it across traces.
    """

    def __init__(self) -> None:
        self.give_up: Callable[[str, str], None] | None = None
        self.leaf: Callable[[int], torch.Tensor] | None = None
        self._leaf_hooks: dict[str, LeafHook] = {}  # while the engine runs
        self.mode: Mode | None = None
        self.recorder: Recorder | None = None
        self._thread = threading.get_ident()
        self._all: list[Call | Hook | Recomputation] = []
        self._regions = 0  # that Python is in
        self._replays = False
        self._recomputed: list[Recomputation] = []  # while events are made again
        self._entered: list[Recomputation] = []  # whose regions autograd is in
        self._attached = 0  # how many of them autograd knows
        self._passes: list[SteppedBackward] = []  # the running backward passes, the innermost last

    # --- what the user gives to autograd --------------------------------------------------------------

    def apply(self, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Does what `function.apply(*args)` does; NotImplemented if it leaves that to PyTorch."""
        if not is_inmost() or not _is_plain(function):
            return NotImplemented
        if self._regions:  # what it saves is computed again when its backward asks for it
            self._not_described("CX0102", f"{function.__name__}.apply in a checkpoint")
            return NotImplemented
        call = Call(self, function, args)
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            returned = call.run_forward(args)
        finally:
            torch._C._set_grad_enabled(grad_mode)
        pattern, outputs, saved = call.describe(args, returned)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self._all.append(call)
        made = handle_torch_function(applied(function), (), pattern, tensors, outputs, saved)
        call.finish()
        if not isinstance(returned, tuple):
            return made[0] if made else returned
        remaining = iter(made)
        return tuple([next(remaining) if isinstance(r, torch.Tensor) else r for r in returned])

    def register_hook(self, function: Callable[[Any], Any], event: Callable[[], Any]) -> RemovableHandle:
        """Does what `Tensor.register_hook` does; `event` makes the event of it."""
        hook = Hook(self, function)
        self._all.append(hook)
        try:
            event()
        except BaseException:  # it is registered once more when the iteration has fallen back
            self._all.remove(hook)
            raise
        return hook.handle()

    def enter_region(self, recomputation: Recomputation) -> None:
        """Begins the region of a checkpoint."""
        self._all.append(recomputation)
        self._regions += 1
        handle_torch_function(entered, ())

    def leave_region(self) -> None:
        """Ends the innermost region."""
        self._regions -= 1
        handle_torch_function(left, ())

    def hook_removed(self) -> None:
        """A hook is removed that a backward pass may have called."""
        self._not_described("CX0109", "a hook is removed")

    def _not_described(self, id_: str, what: str) -> None:
        """Something happens that no event shows, so nothing may be learned of this iteration."""
        if self.give_up is not None:
            self.give_up(id_, what)
        if self.recorder is not None:
            self.recorder.fail(id_, what)

    # --- events -------------------------------------------------------------------------------------

    def maker(self, function: Any) -> Callable[..., Any] | None:
        """What makes a call that is an event, if that is not the function itself."""
        if function.__class__ is Applied or function in (hooked, entered):
            return self._attach
        if function is left:
            return self._leave
        if function is go_on:
            return self._go_on
        if function in functions.BACKWARD and (self._attached or self._hooked_leaves()):
            return lambda *args, **kwargs: self._start(function, args, kwargs)
        return None

    def recorded(self, function: Any, args: tuple[Any, ...]) -> None:
        """Notes that a call which is an event has been recorded."""
        if function.__class__ is Applied and self.recorder is not None:
            call: Any = self._all[self._attached - 1]
            call.attached(self.recorder, args[2])

    def _attach(self, *args: Any) -> Any:
        callback: Any = self._all[self._attached]
        self._attached += 1
        if isinstance(callback, Recomputation):
            self._entered.append(callback)
        return callback.attach(*args)

    def _leave(self) -> None:
        self._entered.pop().region.leave()

    def _start(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _given("create_graph", function, args, kwargs) or not self._is_recording():
            return function(*args, **kwargs)
        if not self._passes:
            for uid, leaf in self._hooked_leaves().items():
                self._leaf_hooks |= stand_ins(self, uid, leaf)
        self._passes.append(SteppedBackward())
        assert self.recorder is not None
        modes = self.recorder.on_another_thread()
        return self._advanced(
            lambda: self._passes[-1].start(lambda: function(*args, **kwargs), ambient(), modes)
        )

    def _is_recording(self) -> bool:
        return self.recorder is not None and self.recorder.cause is None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """For the time in which events are made again, those of callbacks among them."""
        self._replays = True
        try:
            yield
        finally:
            self._replays = False

    def _go_on(self, returned: Any) -> Any:
        if self._replays and self._recomputed:
            self._recomputed.pop().end_saving()
        return self._advanced(lambda: self._passes[-1].go_on(returned))

    def _advanced(self, advance: Callable[[], Any]) -> Any:
        ended = True
        try:
            answer = advance()
            ended = answer.__class__ is not CalledBack
            if not ended and self._replays:
                callback = self._find(answer[0])
                if isinstance(callback, Recomputation):
                    callback.begin_saving()
                    self._recomputed.append(callback)
            return answer
        finally:
            if ended:
                self._pass_ended()

    def _pass_ended(self) -> SteppedBackward:
        ended = self._passes.pop()
        if not self._passes:
            for hook in self._leaf_hooks.values():
                hook.put_back()
            self._leaf_hooks.clear()
        return ended

    def _hooked_leaves(self) -> dict[int, torch.Tensor]:
        return {} if self.recorder is None else self.recorder.hooked_leaves()

    # --- backward -----------------------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """Whether the engine, on the thread that asks, belongs to a pass that the program steps through."""
        return bool(self._passes) and threading.get_ident() != self._thread

    def call_back(self, callback: Callback, gradients: Sequence[Any]) -> Any:
        """Has the program call the user's function; is called on a thread of the engine."""
        name = callback.name if isinstance(callback, LeafHook) else str(self._all.index(callback))
        with WithoutModes():  # objects that Python does not know already; nothing is computed
            own = [None if g is None else alias_of(g) for g in gradients]
        return self._passes[-1].call_back(CalledBack((name, *own)))

    def drive(
        self, function: Any, args: Any, kwargs: Any, answer: Any, advance: Advance, raised: Callable[[], None]
    ) -> Any:
        """Calls the user as long as a backward pass asks for it.

        Args:
            function: what began the backward pass.
            args: its positional arguments.
            kwargs: its keyword arguments.
            answer: what it returned.
            advance: lets it go on with what the user returned, and returns what it returns then.
            raised: is called when the user's code raises, before the pass is ended.
        """
        frees = not _given("retain_graph", function, args, kwargs)
        while answer.__class__ is CalledBack:
            name, *gradients = answer
            callback = self._find(name)
            try:
                returned = self._run(callback, gradients)
            except BaseException as error:
                raised()
                self.throw(error)
                raise
            callback.spent = frees
            answer = advance(returned)
        return answer

    def _find(self, name: str) -> Callback:
        if name.isdigit():
            return self._all[int(name)]
        found = self._leaf_hooks.get(name)
        if found is None:
            assert self.leaf is not None
            found = LeafHook.named(self, name, self.leaf)
        return found

    def _run(self, callback: Callback, gradients: Sequence[Any]) -> Any:
        assert self.mode is not None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with self.mode.below(sys._getframe()):
                return callback.run(gradients)
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def throw(self, error: BaseException) -> None:
        """Ends the innermost backward pass, if the engine runs one, by what the user's code raised."""
        if self._passes:
            self._pass_ended().throw(error)

    # --- the end --------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drops what backward passes may ask for, before it is seen which placeholders Python holds."""
        for callback in self._all:
            callback.forget()

    def come_apart(self) -> None:
        """Ends everything: what autograd calls from here on is called as it is."""
        while self._passes:
            self.throw(RuntimeError("the block has been left"))
        for callback in self._all:
            callback.part()
        self._all.clear()
        self.mode = self.recorder = self.give_up = self.leaf = None


def _given(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that runs a backward pass sets one of its flags."""
    return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get(name))


def _is_plain(function: Any) -> bool:
    """Whether a custom function has nothing that is left to PyTorch."""
    both = function.backward is not Function.backward and function.vjp is not Function.vjp
    jvp = getattr(function, "jvp", None) is not Function.jvp
    special = getattr(function, "boxed_grads_call", False) or getattr(
        function, "clear_saved_tensors_on_access", False
    )
    return not (both or jvp or special) and is_documented(function)
