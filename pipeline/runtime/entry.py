"""Where activations of other stages enter autograd, and their gradients leave it.

In:  tensors without history.
Out: the same tensors with one; when backward comes to them, their gradients.

A leaf would do the same, but its node keeps the tensor alive until backward is over, whether anything needs
it or not. This node keeps nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Tensors = tuple[torch.Tensor, ...]


class Entry:
    """The inputs of one pass.

    Attributes:
        edges: One for each floating-point input, once it has entered.
        found: Their gradients, once backward has come to them; None where nothing depends on an input.
    """

    def __init__(self, inputs: Tensors) -> None:
        self.edges: tuple[GradientEdge, ...] = ()
        self._like = tuple((t.shape, t.dtype, t.device) for t in inputs if t.is_floating_point())
        self.found: tuple[torch.Tensor | None, ...] = (None,) * len(self._like)

    def enter(self, inputs: Tensors) -> Tensors:
        """The inputs, those of floating-point type with a history that begins here."""
        floating = [t for t in inputs if t.is_floating_point()]
        if not floating:
            return inputs
        anchor = torch.zeros((), requires_grad=True, device=floating[0].device)
        entered: Tensors = _Enter.apply(anchor, self, *floating)  # type: ignore[no-untyped-call] # torch has none
        self.edges = tuple(get_gradient_edge(t) for t in entered)
        replaced = iter(entered)
        return tuple(next(replaced) if t.is_floating_point() else t for t in inputs)

    def gradients(self) -> Tensors:
        """Gradients of the floating-point inputs; zeros where nothing depends on one."""
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(self.found, self._like, strict=True)
        )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: Entry, *inputs: torch.Tensor) -> Tensors:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.entry.found = gradients
        return (None, None, *(None for _ in gradients))
