"""The `ctx` of a custom autograd function.

In:  what `forward` and `setup_context` do with it.
Out: the same for `backward`, whether autograd has a node of the function (while tracing) or not (in the
     co-execution phase).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from coexec._private import WithoutModes

if TYPE_CHECKING:
    from coexec.callbacks.call import Call

#: What a real `ctx` has besides what PyTorch documents. Functions that name it get the real one.
_UNDOCUMENTED = frozenset(
    {"next_functions", "metadata", "register_hook", "register_prehook", "saved_variables", "to_save"}
    | {"saved_for_forward", "save_for_forward", "dirty_tensors", "non_differentiable", "mark_shared_storage"}
    | {"_raw_saved_tensors", "_sequence_nr", "_forward_cls", "_get_user_fn"}
)


class Context(FunctionCtx):
    """What a custom function's methods get as `ctx`.

    Attributes:
        needs_input_grad: for each argument of `forward`, whether it is a tensor that requires a gradient.
        node: the autograd node, while that is calling `backward`.
        unpacked: is called with what that node had saved.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...], call: Call) -> None:
        self.needs_input_grad = needs_input_grad
        self.materialize_grads = True
        self.to_save = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.non_differentiable = ()
        self.output_grad_dtypes: tuple[Any, ...] | None = None
        self.node: Any = None
        self.unpacked: Callable[[Any], None] | None = None
        self._call = weakref.ref(call)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors that were given to `save_for_backward`."""
        if self.node is None:
            return tuple(self.to_save)
        with WithoutModes():  # autograd makes new objects of what it has; nothing is computed
            tensors: tuple[Any, ...] = self.node.saved_tensors
        if self.unpacked is not None:
            self.unpacked(tensors)
        return tensors

    def __getattr__(self, name: str) -> Any:
        call = self.__dict__.get("_call", _nobody)()
        if call is None or not hasattr(BackwardCFunction, name):
            raise AttributeError(f"the context of an autograd function has no attribute {name!r}")
        return call.undocumented(name)


def _nobody() -> None:
    """The call of a context that has none."""


def is_documented(function: type[torch.autograd.Function]) -> bool:
    """Whether a custom function uses its `ctx` only as PyTorch documents, as far as its code names it."""
    methods = (function.forward, function.backward, function.vjp, function.setup_context)
    codes = (getattr(m, "__code__", None) for method in methods for m in (method, inspect.unwrap(method)))
    return all(_UNDOCUMENTED.isdisjoint(_names(code)) for code in codes)


def _names(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))
