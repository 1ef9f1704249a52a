"""The hooks of a leaf from outside of the block.

In:  the leaf, with the hooks that it has when a backward pass begins.
Out: calls of the user's functions, when the engine or the program asks for them.

While the real engine runs, stand-ins are in the places of the user's functions. A hook may remove another one
or itself. A pass that is replayed, because the program has seen a part of it, begins with the hooks that it
began with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from coexec.callbacks.hook import named_like

if TYPE_CHECKING:
    from coexec.callbacks.passes import Passes

_BEHIND = "behind"
_HOOKS = {"gradient": "_backward_hooks", _BEHIND: "_post_accumulate_grad_hooks"}


class LeafHook:
    """A hook of a leaf, by its place among the leaf's hooks.

    Attributes:
        name: names it across traces.
        place: where it is: the leaf's dictionary, and the key.
    """

    def __init__(
        self, passes: Passes, name: str, leaf: torch.Tensor, hooks: dict[int, Any], key: int
    ) -> None:
        self.name = name
        self.place = hooks, key
        self.spent = False  # it belongs to the leaf, and can be called at any time
        self._passes = passes
        self._leaf = leaf
        self._takes_leaf = name.split()[1] == _BEHIND
        self._function = hooks[key]
        self._is_removed = False

    def take_place(self) -> None:
        """Has the engine stop before it calls the user's function."""
        hooks, key = self.place
        self._is_removed = hooks.pop(key, None) is None
        hooks[key] = named_like(self._function, self._called_back)

    def put_back(self) -> None:
        """Has the engine call the user's function again, unless that has been removed."""
        hooks, key = self.place
        if self._is_removed:
            hooks.pop(key, None)
        elif key in hooks:
            hooks[key] = self._function

    def run(self, gradients: Sequence[Any]) -> Any:
        """Calls the user's function."""
        return self._function(self._leaf) if self._takes_leaf else self._function(*gradients)

    def _called_back(self, tensor: torch.Tensor) -> Any:
        gradients = () if self._takes_leaf else (tensor,)
        stepping = self._passes.is_stepping
        return self._passes.call_back(self.name, gradients) if stepping else self.run(gradients)


def leaf_hooks(passes: Passes, leaves: Mapping[int, torch.Tensor]) -> dict[str, LeafHook]:
    """The hooks that leaves have, by name; the leaves by what names them across traces."""
    found = {}
    with torch._C.DisableTorchFunction():
        for uid, leaf in leaves.items():
            for kind, attribute in _HOOKS.items():
                hooks = getattr(leaf, attribute) or {}
                for place, key in enumerate(hooks):
                    name = f"{uid} {kind} {place}"
                    found[name] = LeafHook(passes, name, leaf, hooks, key)
    return found


def take_places(hooks: Iterable[LeafHook]) -> bool:
    """Puts stand-ins in the places of hooks, in their order.

    Returns:
        Whether the leaves have other hooks by now.
    """
    each: dict[int, list[LeafHook]] = defaultdict(list)
    for hook in hooks:
        each[id(hook.place[0])].append(hook)
    changed = False
    for group in each.values():
        now, keys = group[0].place[0], [hook.place[1] for hook in group]
        changed |= list(now) != keys
        for hook in group:
            hook.take_place()
        for key in [k for k in now if k not in keys]:  # new ones are behind what is put in again
            now[key] = now.pop(key)
    return changed
