"""What one iteration knows of the code that autograd calls.

In:  calls of custom functions' `apply`, and backward passes, in a traced or co-executed block.
Out: the same through events (see `coexec.tracegraph.callbacks`), with the user's code run on the way.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import handle_torch_function

from coexec._private import WithoutModes, alias_of, has_setup_context, is_inmost
from coexec.callbacks.context import Context, is_documented
from coexec.callbacks.node import attach
from coexec.callbacks.stepped import SteppedBackward
from coexec.tracegraph import functions
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.callbacks import Applied, CalledBack, applied, go_on

Function = torch.autograd.Function

#: Lets a backward pass go on with what the user returned, and returns what it returns then.
Advance = Callable[[Any], Any]


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

    def on_another_thread(self) -> AbstractContextManager[None]:
        """Records what another thread does."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What a forward has said of its inputs and outputs: by their position, or a tensor that is none of them."""

    materialize: bool
    dirty: tuple[Any, ...]
    constant: tuple[Any, ...]


class Call:
    """One call of a custom function.

    Attributes:
        function: the custom function.
        marks: what its forward has said of its inputs and outputs.
        spent: whether a backward pass has called it that frees what it goes through.
    """

    def __init__(self, owner: Callbacks, function: type[Function], args: tuple[Any, ...]) -> None:
        self.function = function
        self.marks = Marks(True, (), ())
        self.owner: Callbacks | None = owner
        self._is_tensor = [isinstance(a, torch.Tensor) for a in args]
        needs = tuple([isinstance(a, torch.Tensor) and a.requires_grad for a in args])
        self.context: Context | None = Context(needs)
        self.spent = False
        self._is_recorded = torch.is_grad_enabled() and any(needs)
        self._saved_outputs: dict[int, int] = {}  # position among what is saved -> among outputs
        self._known: dict[int, Any] = {}  # of saved outputs, what the recorder knows of them
        self._outputs: Sequence[bool] = ()  # which parts of what forward returned are tensors
        self._is_tuple = False

    def run_forward(self, args: tuple[Any, ...]) -> Any:
        """Runs the user's forward."""
        function: Any = self.function
        if not has_setup_context(function):
            return function.forward(self.context, *args)
        returned = function.forward(*args)
        function.setup_context(self.context, args, returned)
        return returned

    def describe(self, args: Sequence[Any], returned: Any) -> tuple[str, list[Any], list[Any]]:
        """What of a forward that has run decides about the rest, its output tensors, and what it saves."""
        context = self.context
        assert context is not None
        parts = returned if isinstance(returned, tuple) else (returned,)
        self._outputs = [isinstance(p, torch.Tensor) for p in parts]
        self._is_tuple = isinstance(returned, tuple)
        outputs = [p for p in parts if isinstance(p, torch.Tensor)]
        self.marks = Marks(
            bool(context.materialize_grads),
            tuple([_position(t, args) for t in context.dirty_tensors]),
            tuple([_position(t, outputs) for t in context.non_differentiable]),
        )
        saved = list(context.to_save)
        self._saved_outputs = {
            i: p
            for i, t in enumerate(saved)
            if t is not None and isinstance(p := _position(t, outputs), int) and _position(t, args) is t
        }
        strays = [m for m in (*self.marks.dirty, *self.marks.constant) if not isinstance(m, int)]
        strays += [t for t in saved if t is not None and not isinstance(t, torch.Tensor)]
        marks = "unusual" if strays else repr(self.marks)
        pattern = f"{self._is_tensor} {self._outputs} {self._is_tuple} {marks} {self._is_recorded}"
        return pattern, outputs, saved

    def attach(self, tensors: Sequence[Any], outputs: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """Gives the outputs of the forward their autograd node; returns what they are then."""
        given = iter(tensors)
        arguments = [next(given) if t else None for t in self._is_tensor]
        returned = attach(self, arguments, outputs, saved)
        if self.context is not None:
            self.context.to_save = ()  # the node has them, in a way that makes no cycle of references
        parts = returned if self._is_tuple else (returned,)
        return [p for p, t in zip(parts, self._outputs, strict=True) if t]

    def returned(self, outputs: Sequence[Any]) -> Any:
        """What `forward` returned, with these tensors in it."""
        given = iter(outputs)
        parts = tuple([next(given) if t else None for t in self._outputs])
        return parts if self._is_tuple else parts[0]

    def finish(self) -> None:
        """Drops what nobody will ask for: autograd has no node of a function that it does not record."""
        if not self._is_recorded:
            self.context = None

    # --- backward ---------------------------------------------------------------------------------

    def run_backward(self, gradients: Sequence[Any]) -> Any:
        """Runs the user's backward."""
        if self.context is None:
            raise RuntimeError(
                f"{self.function.__name__}: trying to backward through a graph of a coexec block a second time, "
                "or behind the block. Do it inside of the block."
            )
        function: Any = self.function
        backward = function.backward if function.vjp is Function.vjp else function.vjp
        return backward(self.context, *gradients)

    def called_back(self, node: Any, gradients: Sequence[Any]) -> Any:
        """Is called by autograd: runs the user's backward, on the program's thread while that waits for it."""
        context, owner = self.context, self.owner
        if context is None:
            return self.run_backward(gradients)
        outer = (context.node, context.unpacked)
        context.node, context.unpacked = node, self._unpacked
        try:
            if owner is None or not owner.is_stepping:
                return self.run_backward(gradients)
            return owner.call_back(self, gradients)
        finally:
            context.node, context.unpacked = outer

    def attached(self, recorder: Recorder, outputs: Sequence[Any]) -> None:
        """Keeps what a recorder knows of saved outputs, which autograd gives back as other objects."""
        self._known = {i: recorder.known(outputs[p]) for i, p in self._saved_outputs.items()}

    def part(self) -> None:
        """Leaves the iteration: if autograd calls it from here on, it runs as it is."""
        self.owner = None
        self._known = {}

    def _unpacked(self, tensors: Sequence[Any]) -> None:
        recorder = None if self.owner is None else self.owner.recorder
        if recorder is None:
            return
        for i, known in self._known.items():
            if known is not None:
                recorder.know_as(tensors[i], known)


class Callbacks:
    """The code of the user that autograd calls in one iteration.

    Attributes:
        mode: the function mode that is active in the block.
        recorder: records the iteration, if it is traced or has fallen back.
    """

    def __init__(self) -> None:
        self.mode: Mode | None = None
        self.recorder: Recorder | None = None
        self._thread = threading.get_ident()
        self._calls: list[Call] = []
        self._attached = 0  # of the calls, how many have a node
        self._passes: list[SteppedBackward] = []  # the running backward passes, the innermost last

    # --- forward ------------------------------------------------------------------------------------

    def apply(self, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Does what `function.apply(*args)` does; NotImplemented if it leaves that to PyTorch."""
        if not is_inmost() or not _is_plain(function):
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
        self._calls.append(call)
        made = handle_torch_function(applied(function), (), pattern, tensors, outputs, saved)
        call.finish()
        if not isinstance(returned, tuple):
            return made[0] if made else returned
        remaining = iter(made)
        return tuple([next(remaining) if isinstance(r, torch.Tensor) else r for r in returned])

    # --- events -------------------------------------------------------------------------------------

    def maker(self, function: Any) -> Callable[..., Any] | None:
        """What makes a call that is an event, if that is not the function itself."""
        if function.__class__ is Applied:
            return self._attach
        if function is go_on:
            return self._go_on
        if function in functions.BACKWARD and self._attached:
            return lambda *args, **kwargs: self._start(function, args, kwargs)
        return None

    def recorded(self, function: Any, args: tuple[Any, ...]) -> None:
        """Notes that a call which is an event has been recorded."""
        if function.__class__ is Applied and self.recorder is not None:
            self._calls[self._attached - 1].attached(self.recorder, args[2])

    def _attach(self, pattern: str, tensors: Any, outputs: Any, saved: Any) -> list[Any]:
        self._attached += 1
        return self._calls[self._attached - 1].attach(tensors, outputs, saved)

    def _start(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _given("create_graph", function, args, kwargs) or not self._is_recording():
            return function(*args, **kwargs)
        self._passes.append(SteppedBackward())
        assert self.recorder is not None
        modes = self.recorder.on_another_thread()
        return self._advanced(
            lambda: self._passes[-1].start(lambda: function(*args, **kwargs), ambient(), modes)
        )

    def _is_recording(self) -> bool:
        return self.recorder is not None and self.recorder.cause is None

    def _go_on(self, returned: Any) -> Any:
        return self._advanced(lambda: self._passes[-1].go_on(returned))

    def _advanced(self, advance: Callable[[], Any]) -> Any:
        ended = True
        try:
            answer = advance()
            ended = answer.__class__ is not CalledBack
            return answer
        finally:
            if ended:
                self._passes.pop()

    # --- backward -----------------------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """Whether the engine, on the thread that asks, belongs to a pass that the program steps through."""
        return bool(self._passes) and threading.get_ident() != self._thread

    def call_back(self, call: Call, gradients: Sequence[Any]) -> Any:
        """Has the program call a function's backward, on a thread of the engine."""
        with WithoutModes():  # objects that Python does not know already; nothing is computed
            own = [None if g is None else alias_of(g) for g in gradients]
        return self._passes[-1].call_back(CalledBack((str(self._calls.index(call)), *own)))

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
            number, *gradients = answer
            call = self._calls[int(number)]
            try:
                returned = self._run(call, gradients)
            except BaseException as error:
                raised()
                self.throw(error)
                raise
            call.spent = frees
            answer = advance(returned)
        return answer

    def _run(self, call: Call, gradients: Sequence[Any]) -> Any:
        assert self.mode is not None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with self.mode.below(sys._getframe()):
                return call.run_backward(gradients)
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def throw(self, error: BaseException) -> None:
        """Ends the innermost backward pass, if the engine runs one, by what the user's code raised."""
        if self._passes:
            self._passes.pop().throw(error)

    # --- the end --------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drops what backward passes may ask for, before it is seen which placeholders Python holds."""
        for call in self._calls:
            if call.spent:
                call.context = None
            elif call.context is not None:
                call.context.to_save = ()  # if the iteration falls back, its event has them

    def come_apart(self) -> None:
        """Ends everything: what autograd calls from here on is called as it is."""
        while self._passes:
            self.throw(RuntimeError("the block has been left"))
        for call in self._calls:
            call.part()
        self._calls.clear()
        self.mode = self.recorder = None


def _position(tensor: Any, among: Sequence[Any]) -> Any:
    """Where a tensor is among others, or the tensor itself."""
    return next((i for i, other in enumerate(among) if other is tensor), tensor)


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
