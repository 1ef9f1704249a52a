"""One hook on a tensor.

In:  the function of the user, which was registered in the block, or on a leaf before it.
Out: calls of the function, when autograd or the program asks for them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from coexec.tracegraph.calls import hooks_of

if TYPE_CHECKING:
    from coexec.callbacks.iteration import Callbacks
    from coexec.callbacks.passes import Passes


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


class LeafHook:
    """A hook on an external leaf, by its place among the leaf's hooks.

    Attributes:
        name: names it across traces.
    """

    def __init__(self, passes: Passes, uid: int, leaf: torch.Tensor, kind: str, place: int) -> None:
        self.name = f"{uid} {kind} {place}"
        self.spent = False  # it belongs to the leaf, and can be called at any time
        self._passes = passes
        self._leaf = leaf
        self._takes_leaf = kind == _BEHIND
        with torch._C.DisableTorchFunction():
            hooks = getattr(leaf, _HOOKS[kind])
        self._hooks: dict[int, Any] = hooks
        self._key = list(hooks)[place]
        self._function = hooks[self._key]
        self._stand_in: Any = None

    @classmethod
    def named(cls, passes: Passes, name: str, leaf: Callable[[int], torch.Tensor]) -> LeafHook:
        """The hook of that name; `leaf` finds the leaf."""
        uid, kind, place = name.split()
        return cls(passes, int(uid), leaf(int(uid)), kind, int(place))

    def take_place(self) -> None:
        """Has the engine stop before it calls the user's function."""
        self._stand_in = self._hooks[self._key] = self._called_back

    def put_back(self) -> None:
        """Has the engine call the user's function again."""
        if self._hooks.get(self._key) is self._stand_in:
            self._hooks[self._key] = self._function

    def run(self, gradients: Sequence[Any]) -> Any:
        """Calls the user's function."""
        return self._function(self._leaf) if self._takes_leaf else self._function(*gradients)

    def _called_back(self, tensor: torch.Tensor) -> Any:
        gradients = () if self._takes_leaf else (tensor,)
        stepping = self._passes.is_stepping
        return self._passes.call_back(self.name, gradients) if stepping else self.run(gradients)


_BEHIND = "behind"
_HOOKS = {"gradient": "_backward_hooks", _BEHIND: "_post_accumulate_grad_hooks"}


def stand_ins(passes: Passes, uid: int, leaf: torch.Tensor) -> dict[str, LeafHook]:
    """Puts stand-ins in the places of all hooks of a leaf; returns them by name."""
    made = [
        LeafHook(passes, uid, leaf, kind, place)
        for kind, count in zip(_HOOKS, hooks_of(leaf), strict=True)
        for place in range(count)
    ]
    for hook in made:
        hook.take_place()
    return {hook.name: hook for hook in made}
