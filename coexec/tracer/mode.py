"""The function mode of the tracing phase: decides which torch calls are events.

In:  every torch call that Python makes inside of the block.
Out: events in the recorder; the program itself runs as if the mode were not there.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from coexec._native.entry import EnteredNatively
from coexec.callbacks.iteration import Callbacks
from coexec.location import locate
from coexec.tracegraph import calls, functions
from coexec.tracegraph.callbacks import CalledBack, go_on, hooked
from coexec.tracer.recorder import Recorder

_UNRECORDED = (
    functions.PASSIVE
    | functions.AMBIENT
    | functions.MARKS
    | {functions.GET_GRAD, functions.SET_GRAD, functions.DELETE_GRAD}
)


class TracingMode(EnteredNatively):
    """Passes torch calls to a recorder, with their location below frame `outermost`."""

    def __init__(self, recorder: Recorder, outermost: FrameType, callbacks: Callbacks) -> None:
        super().__init__()
        self.recorder = recorder
        self.callbacks = callbacks
        self.outermost = outermost

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(function, args, kwargs or {}, locate(1, self.outermost))

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
        """Runs a torch call that Python made at `location`."""
        if function in _UNRECORDED or functions.is_annotation(function):
            return function(*args, **kwargs)
        if function in functions.DATA or any(isinstance(a, torch.Generator) for a in kwargs.values()):
            tensors, _, key = calls.flatten(args, kwargs)
            if functions.is_data(function, tensors, key):
                return function(*args, **kwargs)
        if function in functions.INDEXING:
            args = functions.with_index_tensors(args)
        if kwargs:
            item = Tensor.item
            kwargs = functions.with_numbers(function, kwargs, lambda t: self._event(item, (t,), {}, location))
        if function in functions.SET_REQUIRES_GRAD and self.recorder.is_external(args[0]):
            returned = function(*args, **kwargs)
            self.recorder.refresh(args[0])
            return returned
        if function is functions.REGISTER_HOOK and len(args) == 2 and self.recorder.is_computed(args[0]):
            tensor, hook = args
            return self.callbacks.register_hook(hook, lambda: self._event(hooked, (tensor,), {}, location))
        if function == functions.GET_GRAD_FN:
            node = function(*args, **kwargs)
            known = self.callbacks.node_of(args[0])
            if known is not None and getattr(node, "call", None) is known.call:
                return known
            if node is not None:
                self.recorder.fail("CX0109", "the program looks at grad_fn")
            return node
        return self._event(function, args, kwargs, location)

    def _event(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
        recorder, callbacks = self.recorder, self.callbacks
        answer = recorder.event(function, args, kwargs, location, make=callbacks.maker(function))
        callbacks.recorded(function, args)
        if answer.__class__ is not CalledBack or function is go_on:
            return answer
        return callbacks.drive(
            function,
            args,
            kwargs,
            answer,
            lambda returned: self._event(go_on, (returned,), {}, location),
            lambda: recorder.fail("CX0002", f"a function that {functions.name_of(function)} called raised"),
        )
