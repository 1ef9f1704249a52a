"""One call of a custom autograd function.

In:  the function and its arguments.
Out: its forward, run as the user wrote it; its outputs with their autograd node; its backward, when autograd
     or the program asks for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coexec._private import has_setup_context
from coexec.callbacks.context import Context
from coexec.callbacks.node import attach

if TYPE_CHECKING:
    from coexec.callbacks.iteration import Callbacks
    from coexec.callbacks.passes import Recorder

Function = torch.autograd.Function


@dataclass(frozen=True, slots=True)
class Marks:
    """What a forward has said of its inputs and outputs: by their position, or a tensor that is neither."""

    materialize: bool
    dirty: tuple[Any, ...]
    constant: tuple[Any, ...]
    gradient_dtypes: tuple[Any, ...] | None = None  # of each output, which PyTorch takes from 2.14 on


class Call:
    """One call of a custom function.

    Attributes:
        function: the custom function.
        marks: what its forward has said of its inputs and outputs.
        spent: whether a backward pass has called it that frees what it goes through.
        hooks: what is called behind the backward, with what it has returned and what it was given.
    """

    def __init__(self, owner: Callbacks, function: type[Function], args: tuple[Any, ...]) -> None:
        self.function = function
        self.marks = Marks(True, (), ())
        self._owner: Callbacks | None = owner
        self._is_tensor = [isinstance(a, torch.Tensor) for a in args]
        needs = tuple([isinstance(a, torch.Tensor) and a.requires_grad for a in args])
        self.context: Context | None = Context(needs, self)
        self.spent = False
        self.hooks: OrderedDict[int, Any] = OrderedDict()
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
            context.output_grad_dtypes,
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

    def attach(
        self, pattern: str, tensors: Sequence[Any], outputs: Sequence[Any], saved: Sequence[Any]
    ) -> list[Any]:
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

    def run(self, gradients: Sequence[Any]) -> Any:
        """Runs the user's backward."""
        if self.context is None:
            raise RuntimeError(
                f"{self.function.__name__}: trying to backward through a graph of a coexec block a second "
                "time. Do it inside of the block, and specify retain_graph=True for the first time."
            )
        function: Any = self.function
        backward = function.backward if function.vjp is Function.vjp else function.vjp
        returned = backward(self.context, *gradients)
        for hook in list(self.hooks.values()):
            given = returned if isinstance(returned, tuple) else (returned,)
            changed = hook(given, tuple(gradients))
            returned = returned if changed is None else changed
        return returned

    def called_back(self, node: Any, gradients: Sequence[Any]) -> Any:
        """Is called by autograd: runs the user's backward, on the thread of the program if that waits."""
        context, owner = self.context, self._owner
        if context is None:  # in an iteration that falls back at its end, what the user returned is known
            return owner.call_back(self, gradients) if owner and owner.is_stepping else self.run(gradients)
        outer = (context.node, context.unpacked)
        context.node, context.unpacked = node, self._unpacked
        try:
            if owner is None or not owner.is_stepping:
                return self.run(gradients)
            return owner.call_back(self, gradients)
        finally:
            context.node, context.unpacked = outer

    def undocumented(self, name: str) -> Any:
        """What the node has that the context has not: only while autograd's engine calls the function."""
        if self._owner is not None:
            self._owner.node_needed(self.function.__name__, name)
        node = None if self.context is None else self.context.node
        if node is None:
            raise AttributeError(f"the context of {self.function.__name__} has no attribute {name!r} here")
        return getattr(node, name)

    def attached(self, recorder: Recorder, outputs: Sequence[Any]) -> None:
        """Keeps what a recorder knows of saved outputs, which autograd gives back as other objects."""
        self._known = {i: recorder.known(outputs[p]) for i, p in self._saved_outputs.items()}

    def forget(self) -> None:
        """Drops what a backward pass may ask for, before it is seen which placeholders Python holds."""
        if self.spent:
            self.context = None
            self.hooks.clear()
        elif self.context is not None:
            self.context.to_save = ()  # if the iteration falls back, its event has them

    def part(self) -> None:
        """Leaves the iteration: if autograd calls it from here on, it runs as it is."""
        self._owner = None
        self._known = {}

    def _unpacked(self, tensors: Sequence[Any]) -> None:
        recorder = None if self._owner is None else self._owner.recorder
        if recorder is None:
            return
        for i, known in self._known.items():
            if known is not None:
                recorder.know_as(tensors[i], known)


def _position(tensor: Any, among: Sequence[Any]) -> Any:
    """Where a tensor is among others, or the tensor itself."""
    return next((i for i, other in enumerate(among) if other is tensor), tensor)
