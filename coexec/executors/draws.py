"""Dropout's random numbers in a block, drawn by an operator of our own.

In:  calls of `bernoulli_`, in the order of the program.
Out: operations that draw the same numbers, several at a time. Each passes a token to the next, for the order.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from coexec._native import core
from coexec.executors.sizes import SizeNodes
from coexec.tracegraph.program import Call, Program, Reg


def is_bernoulli(call: Call, program: Program) -> bool:
    """Whether a call that draws is one that the operator replaces."""
    if call.target is not torch.ops.aten.bernoulli_.float or not isinstance(call.args[1], float):
        return False
    meta = program.metas.get(call.args[0].index) if isinstance(call.args[0], Reg) else None
    return (
        meta is not None
        and call.args[2] is None
        and meta.device.type == "cpu"
        and meta.dtype in (torch.float32, torch.float64)
    )


def emit_bernoulli(
    graph: Graph, token: Node, call: Call, program: Program, env: dict[int, Node], sizes: SizeNodes
) -> Node:
    """Adds the operation to a graph.

    Args:
        graph: the block's.
        token: of the draw before.
        call: what it replaces.
        program: the call's.
        env: the nodes of registers, to which the result is added.
        sizes: the nodes of sizes that vary.

    Returns:
        The token of this draw.
    """
    written = call.args[0].index
    meta = program.metas[written]
    geometry, varies = sizes.geometry(meta.shape, meta.stride)
    pair = graph.call_function(
        torch.ops.coexec.bernoulli_of_any_size.default if varies else torch.ops.coexec.bernoulli.default,
        (token, geometry, core.scalar_type(meta.dtype), call.args[1]),
    )
    token, drawn = (graph.call_function(operator.getitem, (pair, n)) for n in range(2))
    result = graph.call_function(torch.ops.aten.copy_.default, (env[written], drawn))
    if call.outs and call.outs[0] is not None:
        env[call.outs[0]] = result
    return token
