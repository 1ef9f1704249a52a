"""The backward passes of an iteration, where the real engine runs: while tracing, and after a fallback.

In:  calls that run a backward pass, and what the user's code has returned.
Out: what the passes return: results, or a `CalledBack` where the user's code has to be called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from coexec._private import WithoutModes, another_object, same_stream
from coexec.callbacks.checkpoint import Recomputation
from coexec.callbacks.leaf_hook import LeafHook, leaf_hooks, take_places
from coexec.callbacks.stepped import SteppedBackward
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.callbacks import CalledBack
from coexec.tracegraph.functions import named_arguments


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


class Passes:
    """The running backward passes, the innermost last.

    Attributes:
        leaf_hooks: by name, those that there were when the outermost pass began.
    """

    def __init__(self) -> None:
        self.leaf_hooks: dict[str, LeafHook] = {}
        self._thread = threading.get_ident()
        self._running: list[SteppedBackward] = []
        self._find: Callable[[str], Any] | None = None  # while events are made again
        self._recomputed: list[Recomputation] = []

    @property
    def is_stepping(self) -> bool:
        """Whether the engine, on the thread that asks, belongs to a pass that the program steps through."""
        return bool(self._running) and threading.get_ident() != self._thread

    def start(self, recorder: Recorder, run: Callable[[], Any]) -> Any:
        """Begins the pass that `run` runs, and records it."""
        if not self._running:
            self.see(recorder.hooked_leaves())
            if take_places(self.leaf_hooks.values()):
                recorder.fail("CX0112", "a hook has removed a hook of a leaf")
        stepped = SteppedBackward()
        self._running.append(stepped)
        contexts = (recorder.on_another_thread(), same_stream())
        return self._advanced(lambda: stepped.start(run, ambient(), contexts))

    @property
    def is_replaying(self) -> bool:
        """Whether events are made again, those of the user's code among them."""
        return self._find is not None

    def see(self, leaves: Mapping[int, torch.Tensor]) -> bool:
        """Keeps the hooks that leaves have when the outermost pass begins; returns whether it does."""
        begins = not self.leaf_hooks
        if begins:
            self.leaf_hooks = leaf_hooks(self, leaves)
        return begins

    def go_on(self, returned: Any) -> Any:
        """Lets the innermost pass go on with what the user's code returned."""
        if self._recomputed:
            self._recomputed.pop().end_saving()
        return self._advanced(lambda: self._running[-1].go_on(returned))

    def throw(self, error: BaseException) -> None:
        """Ends the innermost pass, if there is one, by what the user's code raised."""
        if self._recomputed:
            self._recomputed.pop().end_saving()
        if self._running:
            self._ended().throw(error)

    def abandon(self) -> None:
        """Ends all passes."""
        while self._running or self._recomputed:
            self.throw(RuntimeError("the block has been left"))

    def call_back(self, name: str, gradients: Sequence[Any]) -> Any:
        """Has the program call the user's code; is called on a thread of the engine."""
        with WithoutModes():  # objects that Python does not know already; nothing is computed
            own = [None if g is None else another_object(g) for g in gradients]
        return self._running[-1].call_back(CalledBack((name, *own)))

    @contextmanager
    def replayed(self, find: Callable[[str], Any]) -> Iterator[None]:
        """For the time in which events are made again, those of the user's code among them.

        Args:
            find: the callback of a name.
        """
        self._find = find
        try:
            yield
        finally:
            self._find = None

    def _advanced(self, advance: Callable[[], Any]) -> Any:
        ended = True
        try:
            answer = advance()
            ended = answer.__class__ is not CalledBack
            if not ended and self._find is not None:
                self._save_for(self._find(answer[0]))
            return answer
        finally:
            if ended:
                self._ended()

    def _save_for(self, callback: Any) -> None:
        """The calls that are made again next are those of a checkpoint: autograd needs what they compute."""
        if isinstance(callback, Recomputation):
            callback.begin_saving()
            self._recomputed.append(callback)

    def _ended(self) -> SteppedBackward:
        ended = self._running.pop()
        if not self._running:
            for hook in self.leaf_hooks.values():
                hook.put_back()
            self.leaf_hooks = {}
        return ended


def given(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that runs a backward pass sets one of its flags."""
    return bool(named_arguments(function, args, kwargs).get(name))
