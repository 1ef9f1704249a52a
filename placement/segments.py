"""A set of operations cut out of a graph, as a function of its own.

In:  an OpGraph and a mask.
Out: a Segment: a module of those operations alone, its constants inside, what comes in and leaves.

Two segments that do the same work for other weights have the same `key`, and so the same cost.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from placement.graph import OpGraph, TensorSpec, bits, spec_of


@dataclass(frozen=True, eq=False)
class Segment:
    """A subgraph that can be compiled and run alone.

    `module(*inputs)` gives the tuple of outputs. `mask` are its operations in the graph that it is from.
    """

    module: GraphModule
    mask: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sources: tuple[Node, ...]
    """The graph's nodes that its inputs stand for."""
    results: tuple[Node, ...]
    """The graph's nodes that its outputs stand for."""
    ops: tuple[str, ...]
    """The short names of its operations, in order."""
    key: str
    """A hash of structure, attributes, shapes, strides, dtypes and of which inputs are constant."""

    @property
    def device(self) -> str:
        """The type of its device, such as `cpu`."""
        specs = self.inputs or self.outputs
        return torch.device(specs[0].device).type

    @property
    def title(self) -> str:
        """Its operations for people: `conv2d+relu`."""
        shown = [name for name in self.ops if name not in ("view", "transpose", "permute", "unsqueeze")]
        names = shown or list(self.ops)
        return "+".join(names if len(names) <= 6 else [*names[:3], f"...{len(names) - 5}...", *names[-2:]])

    def __str__(self) -> str:
        return f"{self.title} {', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def cut(graph: OpGraph, mask: int) -> Segment:
    """Cuts a convex set of operations out of a graph.

    Raises:
        ValueError: if the set is empty or not convex.
    """
    if not mask or not graph.is_convex(mask):
        raise ValueError(
            f"the operations {list(bits(mask))} cannot run as one: a path leaves them and comes back"
        )
    body = Graph()
    env: dict[Node, Node] = {}
    sources: list[Node] = []
    constants: dict[str, Any] = {}
    members = graph.members(mask)
    inside = {node for op in members for node in (op.node, *op.results)}
    for op in members:
        for node in op.node.all_input_nodes:
            if node in env or node in inside:
                continue
            if node.op == "get_attr":
                name = f"c{len(constants)}"
                constants[name] = getattr(graph.module, str(node.target))
                env[node] = body.get_attr(name)
            else:
                env[node] = body.placeholder(f"x{len(sources)}")
                sources.append(node)
            env[node].meta["val"] = node.meta["val"]
    _placeholders_first(body)
    for op in members:
        for node in dict.fromkeys((op.node, *op.results)):
            env[node] = body.node_copy(node, env.__getitem__)
            env[node].meta = {"val": node.meta["val"]}
    results = [n for op in members for n in op.results if any(u not in inside for u in n.users)]
    body.output(tuple(env[n] for n in results))
    module = GraphModule(constants, body)
    return Segment(
        module,
        mask,
        tuple(map(spec_of, sources)),
        tuple(map(spec_of, results)),
        tuple(sources),
        tuple(results),
        tuple(op.name for op in members),
        key_of(graph, mask),
    )


def whole(graph: OpGraph) -> Segment:
    """All operations of a graph as one segment."""
    return cut(graph, graph.all)


def _placeholders_first(graph: Graph) -> None:
    constants = [node for node in graph.nodes if node.op == "get_attr"]
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    for node in constants:
        if last is not None:
            last.append(node)
            last = node


def key_of(graph: OpGraph, mask: int) -> str:
    """The hash of what determines a segment's cost: two segments that differ in weights alone share it."""
    names: dict[Node, str] = {}
    lines: list[str] = []

    def encode(value: Any) -> str:
        if isinstance(value, Node):
            if value not in names:
                names[value] = f"{'constant' if value.op == 'get_attr' else 'input'}{len(names)}"
                lines.append(f"{names[value]}: {_layout(value)}")
            return names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(encode, value)) + "]"
        return repr(value)

    members = graph.members(mask)
    inside = {node for op in members for node in (op.node, *op.results)}
    for op in members:
        keywords = ",".join(f"{k}={encode(v)}" for k, v in sorted(op.node.kwargs.items()))
        call = f"{op.node.target} {encode(op.node.args)} {keywords}"
        names[op.node] = f"%{len(names)}"
        lines.append(f"{names[op.node]} = {call}")
        for position, node in enumerate(op.results):
            names.setdefault(node, f"{names[op.node]}[{node.args[1] if node is not op.node else position}]")
            if any(user not in inside for user in node.users):
                lines.append(f"return {names[node]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _layout(node: Node) -> str:
    spec = spec_of(node)
    return f"{spec.dtype} {spec.shape} {spec.stride} {spec.device}"
