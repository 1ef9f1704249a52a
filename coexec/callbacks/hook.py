"""One hook on a tensor of the block.

In:  the function of the user.
Out: a handle, as `Tensor.register_hook` returns it; the function is called when autograd or the program asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from coexec.callbacks.iteration import Callbacks


class Hook:
    """A hook that was registered in the block.

    Attributes:
        spent: whether a backward pass has called it that frees what it goes through.
    """

    def __init__(self, owner: Callbacks, function: Callable[[Any], Any]) -> None:
        self.spent = False
        self._owner: Callbacks | None = owner
        self._function: Callable[[Any], Any] | None = function
        self._real: RemovableHandle | None = None
        self._removed = False

    def attach(self, tensor: torch.Tensor) -> None:
        """Registers it with autograd."""
        if not self._removed:
            self._real = tensor.register_hook(self._called_back)

    def run(self, gradients: Sequence[Any]) -> Any:
        """Calls the user's function."""
        return None if self._function is None else self._function(*gradients)

    def remove(self) -> None:
        """Does what `handle.remove()` does; an iteration whose backward pass it would change is given up."""
        if self._owner is not None and not self.spent:
            self._owner.hook_removed()
        self._removed = True
        if self._real is not None:
            self._real.remove()

    def _called_back(self, gradient: torch.Tensor) -> Any:
        owner = self._owner
        if owner is None or not owner.is_stepping:
            return self.run((gradient,))
        return owner.call_back(self, (gradient,))

    def forget(self) -> None:
        """Drops the function, which may hold placeholders, if nobody will call it."""
        if self.spent:
            self._function = None

    def part(self) -> None:
        """Leaves the iteration: if autograd calls it from here on, it runs as it is."""
        self._owner = None


class Handle(RemovableHandle):
    """What removes a hook."""

    def __init__(self, hook: Hook) -> None:
        super().__init__(OrderedDict())
        self._hook = hook

    def remove(self) -> None:
        """Removes the hook."""
        self._hook.remove()
