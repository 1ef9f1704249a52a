"""Arguments of an operator by its schema.

In:  an operator and a value for each argument that its schema declares, in order.
Out: how a call passes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

#: Operators that change the geometry of a tensor object, and those that give a view with that geometry.
VIEWS = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.as_strided_.default: aten.as_strided.default,
}


def by_schema(target: Any, values: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments of a call, and the keywords that are not what they are by default."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for declared, value in zip(target._schema.arguments, values, strict=True):
        if not declared.kwarg_only:
            positional.append(value)
        elif isinstance(value, (Node, torch.Tensor)) or value != declared.default_value:
            keywords[declared.name] = value
    return positional, keywords
