"""What Python sees of the autograd node of a custom function, in the block that made it.

In:  the call of the function.
Out: the node's name, and hooks on it: full backward hooks of modules are made of these. Whoever asks for
     anything else gets the real node, in an iteration that is none of the graph's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from coexec.callbacks.call import Call


class NodeHandle:
    """Stands for a node.

    Attributes:
        call: the call of the function.
    """

    def __init__(self, call: Call, real: Callable[[], Any]) -> None:
        self.call = call
        self._real = real

    def name(self) -> str:
        """The node's name."""
        return f"{self.call.function.__name__}Backward"

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> RemovableHandle:
        """Has a function called behind the node, with the gradients of its inputs and of its outputs."""
        handle = RemovableHandle(self.call.hooks)
        self.call.hooks[handle.id] = hook
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)
