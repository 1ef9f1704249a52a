"""Placeholders: what Python holds in place of tensors that the GraphRunner computes.

A placeholder is a plain `torch.Tensor` with metadata and without memory. Inside of the block the
PythonRunner's function mode answers for it. Operations that reach C++ code on another way are caught
by `Guard`, so none can read memory that isn't there. When the iteration ends, each placeholder that
the program still holds becomes the real tensor: the same object, another implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coexec._native import core
from coexec._private import (
    OwnMode,
    alias_of,
    become,
    forget_hulls,
    keep_hulls,
    make_wrapper,
    name_node,
    run_seen,
)
from coexec.tracegraph import calls
from coexec.tracegraph.trace import Produced, TensorMeta


@dataclass(slots=True)
class Symbol:
    """A placeholder and what it stands for; in-place calls may change that."""

    tensor: torch.Tensor
    binding: Produced
    meta: TensorMeta
    history: str | None


class _Hollow(torch.Tensor):
    """The class that placeholders are made with; they are of class `torch.Tensor` afterwards."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(
            f"{function} needs a value that coexec has not computed yet (a tensor of a running tape was "
            "used on another thread); read it there after the block"
        )


def make_placeholder(meta: TensorMeta) -> torch.Tensor:
    """A new placeholder."""
    placeholder = make_wrapper(_Hollow, meta)
    placeholder.__class__ = torch.Tensor
    if core is not None:
        core.mark(placeholder)
    return placeholder


def realize(placeholder: torch.Tensor, real: torch.Tensor) -> None:
    """Makes the object a real tensor, for everyone who holds it."""
    become(placeholder, real)


class Guard(OwnMode, TorchDispatchMode):
    """Sees operations that no function mode saw, and calls `give_up` before they touch a placeholder.

    Placeholders are seen above autograd, so that it records and saves what takes their places. Without the
    native core it has done so by then.
    """

    supports_higher_order_operators = True

    def __init__(
        self, is_placeholder: Callable[[torch.Tensor], bool], give_up: Callable[[Any], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_placeholder = is_placeholder
        self._give_up = give_up
        self._handler: Callable[..., None] | None = None  # alive while the native core has it
        self._outer: Callable[..., None] | None = None

    def __enter__(self) -> Guard:
        super().__enter__()  # type: ignore[no-untyped-call]
        if core is not None:
            self._handler = self._seen
            self._outer = core.handle_bypassed(self._handler)
        return self

    def __exit__(self, *error: object) -> None:
        if core is not None:
            core.handle_bypassed(self._outer)
            self._handler = self._outer = None
        forget_hulls()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(self._is_placeholder(t) for t in calls.tensors_in((args, kwargs))):
            self._give_up(function)
        return run_seen(function, args, kwargs or {})

    def _seen(self, name: str, tensor: torch.Tensor) -> None:
        if self._is_placeholder(tensor):
            with keep_hulls():
                self._give_up(name)


def dressed(value: torch.Tensor, meta: TensorMeta, history: str | None) -> torch.Tensor:
    """A tensor on the memory of `value` that looks to Python as eager's would.

    Its autograd history, if it had one, has been used up by a backward pass inside of the block:
    the name is right, and another backward pass through it is the error that it is in eager.
    """
    if value.is_conj() or value.is_neg():
        return value.detach().requires_grad_(meta.requires_grad)
    alias = alias_of(value)
    if not meta.requires_grad:
        return alias
    if meta.is_leaf:
        return alias.requires_grad_()
    with torch.enable_grad():
        return _used_history(history or "UnknownBackward").apply(_ANCHOR, [alias])  # type: ignore[no-any-return]


_ANCHOR = torch.zeros((), requires_grad=True)
_functions: dict[str, Any] = {}


def _used_history(name: str) -> Any:
    if name not in _functions:
        _functions[name] = type("UsedHistory", (_UsedHistory,), {})
        name_node(_functions[name], name)
    return _functions[name]


class _UsedHistory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        return holder[0]  # not an argument itself: its output would be a view of it

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (the saved tensors were freed by the "
            "backward pass inside of the tape's block). Specify retain_graph=True for that one."
        )
