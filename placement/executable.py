"""Executable: a placement as one function of tensors.

In:  an OpGraph, a Placement, and the function of each part.
Out: generated Python code that calls them in order and frees each tensor after its last use.

Tensors go from one part to the next as they are: nothing is copied at a border that the backend
itself doesn't copy. Operations of the reference backend are calls in the generated code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from placement.backends.base import Run
from placement.graph import OpGraph
from placement.placements import Part, Placement
from placement.registry import REFERENCE
from placement.segments import Segment


def build(
    graph: OpGraph, placement: Placement, parts: Mapping[Part, tuple[Segment, Run]]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function of a placement: from the graph's inputs to its outputs.

    Args:
        graph: what was placed.
        placement: where.
        parts: segment and function of each part that is not on the reference backend.
    """
    body = Graph()
    env: dict[Node, Node] = {}
    attributes: dict[str, Any] = {}
    for node in graph.module.graph.find_nodes(op="placeholder"):
        env[node] = body.placeholder(str(node.target))

    def read(node: Node) -> Node:
        if node not in env:
            attributes[str(node.target)] = getattr(graph.module, str(node.target))
            env[node] = body.get_attr(str(node.target))
        return env[node]

    for number, part in enumerate(placement.parts):
        if part.backend == REFERENCE:
            for op in graph.members(part.mask):
                for node in dict.fromkeys((op.node, *op.results)):
                    env[node] = body.node_copy(node, read)
        else:
            segment, run = parts[part]
            _call(body, env, read, segment, run, f"{part.backend}_{number}")
    output = graph.module.graph.output_node().args[0]
    body.output(torch.fx.map_arg(output, read))
    module = GraphModule(attributes, body)
    function: Callable[..., tuple[torch.Tensor, ...]] = module.forward
    return function


def repeated(segment: Segment, run: Run, times: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Generated code that calls one function several times with the same inputs."""
    body = Graph()
    env = {node: body.placeholder(f"x{i}") for i, node in enumerate(segment.sources)}
    for number in range(times):
        _call(body, env, env.__getitem__, segment, run, f"repeated_{number}")
    body.output(tuple(env[node] for node in segment.results))
    function: Callable[..., tuple[torch.Tensor, ...]] = GraphModule({}, body).forward
    return function


def _call(
    body: Graph, env: dict[Node, Node], read: Callable[[Node], Node], segment: Segment, run: Run, name: str
) -> None:
    def part(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run(*inputs)

    # The code generator names the function in its globals after this.
    part.__name__ = part.__qualname__ = "".join(c if c.isalnum() else "_" for c in name)
    part.__module__ = "placement.parts"
    called = body.call_function(part, tuple(read(node) for node in segment.sources))
    for position, node in enumerate(segment.results):
        env[node] = body.call_function(operator.getitem, (called, position))
