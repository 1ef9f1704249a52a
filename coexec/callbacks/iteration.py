"""What one iteration knows of the code that autograd calls.

In:  custom functions, hooks, checkpoints and backward passes, in a traced or co-executed block.
Out: the same through events (see `coexec.tracegraph.callbacks`), with the user's code run on the way.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import handle_torch_function
from torch.utils.hooks import RemovableHandle

from coexec._private import are_nodes_hooked, is_inmost
from coexec.callbacks.call import Call
from coexec.callbacks.checkpoint import Recomputation
from coexec.callbacks.context import is_documented
from coexec.callbacks.handle import NodeHandle
from coexec.callbacks.hook import Hook
from coexec.callbacks.leaf_hook import LeafHook
from coexec.callbacks.passes import Passes, Recorder, given
from coexec.tracegraph import functions
from coexec.tracegraph.callbacks import (
    Applied,
    CalledBack,
    applied,
    entered,
    go_on,
    is_callback,
    left,
)

Function = torch.autograd.Function
Callback = Call | Hook | LeafHook | Recomputation

#: Lets a backward pass go on with what the user returned, and returns what it returns then.
Advance = Callable[[Any], Any]


class Mode(Protocol):
    """The function mode of the block."""

    def below(self, frame: FrameType) -> AbstractContextManager[None]:
        """Enters the mode again, for calls made below a frame."""


class Callbacks:
    """The code of the user that autograd calls in one iteration.

    Attributes:
        mode: the function mode that is active in the block.
        recorder: records the iteration, if it is traced or has fallen back.
        give_up: makes a co-executed iteration eager, for a reason.
        hooked_leaves: finds leaves with hooks in a co-executed iteration, by what names them across traces.
        passes: the backward passes of the real engine.
    """

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.recorder: Recorder | None = None
        self.give_up: Callable[[str, str], None] | None = None
        self.hooked_leaves: Callable[[], dict[int, torch.Tensor]] | None = None
        self.passes = Passes()
        self._all: list[Call | Hook | Recomputation] = []
        self._attached = 0  # how many of them autograd knows
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Call]] = {}  # by id of an output
        self._regions = 0  # of checkpoints, that Python is in
        self._entered: list[Recomputation] = []  # whose regions autograd is in
        self._at_end: list[list[Callable[[], None]]] = []  # of each pass whose code is being called

    # --- what the user gives to autograd --------------------------------------------------------------

    def apply(self, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Does what `function.apply(*args)` does; NotImplemented if it leaves that to PyTorch."""
        if not is_inmost() or not _is_plain(function) or are_nodes_hooked():
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
        event: Any = applied(function)
        made: list[Any] = handle_torch_function(event, (), pattern, tensors, outputs, saved)
        call.finish()
        self._made |= {id(t): (weakref.ref(t), call) for t in made}
        if not isinstance(returned, tuple):
            return made[0] if made else returned
        remaining = iter(made)
        return tuple([next(remaining) if isinstance(r, torch.Tensor) else r for r in returned])

    def node_of(self, tensor: torch.Tensor) -> NodeHandle | None:
        """The autograd node of a tensor that a custom function has returned."""
        made = self._made.get(id(tensor))
        if made is None or made[0]() is not tensor or made[1].context is None:
            return None

        def real() -> Any:
            self._not_described("CX0109", "the program looks at grad_fn")
            with torch._C.DisableTorchFunction():
                return tensor.grad_fn

        return NodeHandle(made[1], real)

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

    def hook_removed(self) -> None:
        """A hook is removed that a backward pass may have called."""
        self._not_described("CX0109", "a hook is removed")

    def node_needed(self, function: str, name: str) -> None:
        """A custom function uses its context in a way that only the real one can be used in."""
        self._not_described("CX0102", f"{function} looks at {name} of its context")

    def enter_region(self, recomputation: Recomputation) -> None:
        """Begins the region of a checkpoint."""
        self._all.append(recomputation)
        self._regions += 1
        handle_torch_function(entered, (), recomputation.pattern)

    def leave_region(self) -> None:
        """Ends the innermost region."""
        self._regions -= 1
        if self.mode is not None:
            handle_torch_function(left, ())
        elif self._entered:  # before PyTorch 2.13, an exception keeps its region until it is let go itself
            self._leave()

    def _not_described(self, id_: str, what: str) -> None:
        """Something happens that no event shows, so nothing may be learned of this iteration."""
        if self.give_up is not None:
            self.give_up(id_, what)
        if self.recorder is not None:
            self.recorder.fail(id_, what)

    # --- events -------------------------------------------------------------------------------------

    def maker(self, function: Any) -> Callable[..., Any] | None:
        """What makes a call that is an event, if that is not the function itself."""
        if is_callback(function):
            return self._attach
        if function is left:
            return self._leave
        if function is go_on:
            return self.passes.go_on
        if function in functions.BACKWARD and self._has_callbacks():
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

    def _has_callbacks(self) -> bool:
        recorder = self.recorder
        if recorder is None:
            return False
        return bool(self._attached or self.passes.leaf_hooks or recorder.hooked_leaves())

    def _start(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        assert recorder is not None
        if given("create_graph", function, args, kwargs):
            recorder.fail("CX0102", "a backward pass that makes a graph may call code of the user")
        if recorder.cause is not None and not self.passes.is_replaying:
            return function(*args, **kwargs)
        return self.passes.start(recorder, lambda: function(*args, **kwargs))

    # --- calls of the user's code -----------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """Whether the engine, on the thread that asks, belongs to a pass that the program steps through."""
        return self.passes.is_stepping

    def call_back(self, callback: Call | Hook | Recomputation, gradients: Sequence[Any]) -> Any:
        """Has the program call the user's code; is called on a thread of the engine."""
        return self.passes.call_back(str(self._all.index(callback)), gradients)

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
        frees = not given("retain_graph", function, args, kwargs)
        co_executed = self.recorder is None and self.hooked_leaves is not None
        begins = co_executed and self.passes.see(self.hooked_leaves())  # type: ignore[misc]  # it is not None
        at_end: list[Callable[[], None]] = []
        while answer.__class__ is CalledBack:
            name, *gradients = answer
            callback = self.find(name)
            self._at_end.append(at_end)
            try:
                returned = self._run(functools.partial(callback.run, gradients))
            except BaseException as error:
                raised()
                self.passes.throw(error)
                raise
            finally:
                self._at_end.pop()
            callback.spent = frees
            answer = advance(returned)
        if begins and self.recorder is None:
            self.passes.leaf_hooks = {}
        for call in at_end:
            self._run(call)
        return answer

    def queue_callback(self, function: Callable[[], None]) -> bool:
        """Has a function called at the end of the pass whose code is being called; False if there is none."""
        if self._at_end:
            self._at_end[-1].append(function)
        return bool(self._at_end)

    def find(self, name: str) -> Callback:
        """The callback that a `CalledBack` names."""
        return self._all[int(name)] if name.isdigit() else self.passes.leaf_hooks[name]

    def _run(self, call: Callable[[], Any]) -> Any:
        assert self.mode is not None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with self.mode.below(sys._getframe()):
                return call()
        finally:
            torch._C._set_grad_enabled(grad_mode)

    # --- the end --------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drops what backward passes may ask for, before it is seen which placeholders Python holds."""
        for callback in self._all:
            callback.forget()

    def come_apart(self) -> None:
        """Ends everything: what autograd calls from here on is called as it is."""
        self.passes.abandon()
        for callback in self._all:
            callback.part()
        self._all.clear()
        self._made.clear()
        self.mode = self.recorder = self.give_up = self.hooked_leaves = None


def _is_plain(function: Any) -> bool:
    """Whether a custom function has nothing that is left to PyTorch."""
    both = function.backward is not Function.backward and function.vjp is not Function.vjp
    special = ("boxed_grads_call", "clear_saved_tensors_on_access")
    return (
        not both
        and function.jvp is Function.jvp
        and not any(getattr(function, name, False) for name in special)
        and is_documented(function)
    )
