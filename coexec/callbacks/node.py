"""The node of a custom function in the real autograd graph.

In:  what the function's forward has computed and saved, by events of their own.
Out: outputs whose history is a node that calls back: the function's `backward` is called through its `Call`.

The node is made by an autograd function whose `forward` only returns what there is, so what PyTorch does with
outputs (an input that is returned, marks, materialized gradients, checks of versions) is done by PyTorch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from coexec._private import give_attributes, name_node, run_apply

if TYPE_CHECKING:
    from coexec.callbacks.call import Call

_thread = threading.local()


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        call, outputs, saved = _thread.attaching
        ctx.call = call
        marks = call.marks
        ctx.set_materialize_grads(marks.materialize)
        if marks.dirty:
            ctx.mark_dirty(*[_marked(m, arguments) for m in marks.dirty])
        if marks.constant:
            ctx.mark_non_differentiable(*[_marked(m, outputs) for m in marks.constant])
        if marks.gradient_dtypes is not None:
            ctx.set_output_grad_dtype(*marks.gradient_dtypes)
        if saved:
            ctx.save_for_backward(*saved)
        return call.returned(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.call.called_back(ctx, gradients)


def attach(call: Call, arguments: Sequence[Any], outputs: Sequence[Any], saved: Sequence[Any]) -> Any:
    """Gives outputs the node of a custom function; returns what its `apply` returns."""
    _thread.attaching = (call, outputs, saved)
    try:
        return run_apply(_node_of(call.function), *arguments)
    finally:
        del _thread.attaching


def _marked(mark: Any, among: Sequence[Any]) -> Any:
    return among[mark] if isinstance(mark, int) else mark


def _attribute(node: Any, name: str) -> Any:
    """What the user has given the `ctx`: in PyTorch that is the node itself."""
    context = None if name == "call" else node.call.context
    if context is None or name.startswith("__"):
        raise AttributeError(f"the autograd node has no attribute {name!r}")
    return getattr(context, name)


_nodes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _node_of(function: type[torch.autograd.Function]) -> Any:
    node = _nodes.get(function)
    if node is None:
        node = _nodes[function] = type("Node", (_Node,), {})
        name_node(node, f"{function.__name__}Backward")
        give_attributes(node, _attribute)
    return node
