"""One hook on a tensor of the block.

In:  the function of the user.
Out: calls of the function, when autograd or the program asks for them.
"""

from __future__ import annotations

import weakref
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
        self._removable = _Removable(self)

    def handle(self) -> RemovableHandle:
        """What removes the hook."""
        handle = RemovableHandle(self._removable)
        self._removable[handle.id] = None  # a key to be taken out
        return handle

    def attach(self, tensor: torch.Tensor) -> None:
        """Registers it with autograd."""
        if not self._removed:
            self._real = tensor.register_hook(named_like(self._function, self._called_back))

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


def named_like(function: Any, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that makes a call, with the name by which errors speak of the user's function."""

    def called_back(tensor: torch.Tensor) -> Any:
        return call(tensor)

    called_back.__name__ = getattr(function, "__name__", type(function).__name__)
    return called_back


class _Removable(OrderedDict[int, Any]):
    """What a handle takes a hook out of."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self._hook = weakref.ref(hook)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        hook = self._hook()
        if hook is not None:
            hook.remove()
