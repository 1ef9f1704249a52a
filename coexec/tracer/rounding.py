"""Gradients that PyTorch computes in another way, with other bits, while a dispatch mode is active.

In:  a call that runs a backward pass.
Out: the autograd node whose formula asks whether a mode or a subclass of tensors looks on, if there is one.

Such formulas of PyTorch's (in `FunctionsManual.cpp`) write in place where nobody looks on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coexec._private import VERSION
from coexec.callbacks.passes import given
from coexec.tracegraph import calls
from coexec.tracer.nodes import nodes_behind

#: Nodes whose gradients are others, without the number at the end of their names.
_ONCE = frozenset({"ProdBackward", "OrmqrBackward", *(["CumprodBackward"] if VERSION < (2, 12) else [])})

#: Nodes the gradients of whose gradients are others.
_TWICE = frozenset({"CumprodBackward", "LinalgDetBackward", "LinalgSlogdetBackward"})


def rounded_otherwise(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """The node that makes a backward pass compute other bits while it is recorded; None if there is none."""
    try:
        twice = given("create_graph", function, args, kwargs)
    except TypeError:
        return None  # the call will say what is wrong
    others = _ONCE | _TWICE if twice else _ONCE
    names = (node.name() for node in nodes_behind(calls.tensors_in((args, kwargs))))
    return next((name for name in names if name.rstrip("0123456789") in others), None)
