"""Activation checkpointing, without reentrant autograd.

In:  what `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` does in the block: a frame, and a
     region in which autograd saves nothing.
Out: the same. That the region begins and ends are events; that its function runs again is a callback of the
     backward pass.

While the real engine runs, PyTorch's own hooks decide what is computed again, and when that is enough: a
torch call then raises in the middle of the function. In the co-execution phase the event of that call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from coexec._private import CheckpointFrame, CheckpointRegion, StopRecomputing, own_hooks, top_saving_hooks

if TYPE_CHECKING:
    from coexec.callbacks.iteration import Callbacks

_STOPPED = "stopped"


def frame_of(callbacks: Callbacks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What PyTorch makes for a checkpoint in the block."""
    return (_Frame if callbacks.recorder is None else CheckpointFrame)(*args, **kwargs)


class _Frame(CheckpointFrame):  # type: ignore[misc]  # it has no types
    """A frame of the co-execution phase: its inputs may be placeholders, which autograd cannot save."""

    def save_inputs(self, *args: Any) -> None:
        self.saved_args = list(args)


class Region(CheckpointRegion):  # type: ignore[misc]  # it has no types
    """The part of the forward in which autograd saves nothing."""

    def __init__(self, callbacks: Callbacks, frame: Any) -> None:
        super().__init__(frame)
        self._callbacks = callbacks
        self._frame = frame

    def __enter__(self) -> None:
        self._callbacks.enter_region(Recomputation(self._callbacks, self, self._frame))

    def __exit__(self, *error: object) -> None:
        self._callbacks.leave_region()

    def enter(self) -> None:
        """Has autograd save nothing."""
        own_hooks.add(self.pack_hook)
        super().__enter__()

    def leave(self) -> None:
        """Has autograd save again."""
        super().__exit__()


class Recomputation:
    """The function of a checkpoint, which the backward pass runs again.

    Attributes:
        spent: whether a backward pass has called it that frees what it goes through.
        region: where it ran first.
        pattern: what of the checkpoint decides about how it is run again.
    """

    def __init__(self, owner: Callbacks, region: Region, frame: Any) -> None:
        self.spent = False
        self.region = region
        self.pattern = f"early stop: {bool(frame.early_stop)}"
        self._owner: Callbacks | None = owner
        self._frame = frame
        self._function: Callable[..., Any] = frame.recompute_fn
        self._args: Sequence[Any] | None = None
        self._hooks: tuple[Any, Any] | None = None  # with which the engine has the results saved
        self._saving: Any = None  # what is entered meanwhile
        frame.recompute_fn = self._called_back

    def attach(self, pattern: str) -> None:
        """Begins the region."""
        self.region.enter()

    def run(self, gradients: Sequence[Any]) -> str | None:
        """Runs the function again; returns whether it was stopped."""
        args = self._frame.get_inputs() if self._args is None else self._args
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        self.begin_saving()
        try:
            self._function(*args)
        except StopRecomputing:
            return _STOPPED
        finally:
            self.end_saving()
            torch._C._set_grad_enabled(grad_mode)
        return None

    def begin_saving(self) -> None:
        """Has the results saved for the engine, if that runs."""
        if self._hooks is not None:
            self._saving = torch.autograd.graph.saved_tensors_hooks(*self._hooks)
            self._saving.__enter__()

    def end_saving(self) -> None:
        """Has no more results saved."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.__exit__()

    def _called_back(self, *args: Any) -> None:
        owner = self._owner
        if owner is None or not owner.is_stepping:
            self._function(*args)
            return
        hooks = top_saving_hooks()
        assert hooks is not None  # the engine has entered them
        self._args, self._hooks = args, hooks
        own_hooks.add(hooks[0])
        try:
            stopped = owner.call_back(self, ())
        finally:
            self._args = self._hooks = None
        if stopped:
            raise StopRecomputing

    def forget(self) -> None:
        """Drops the inputs, if nobody will ask for them."""
        if self.spent:
            self._frame.saved_args = []

    def part(self) -> None:
        """Leaves the iteration: if autograd calls it from here on, it runs as it is."""
        self._owner = None
        self._frame.recompute_fn = self._function
