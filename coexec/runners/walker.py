"""The native hot path of the PythonRunner, prepared from a skeleton.

In:  a TraceGraph with interned parts, and its program.
Out: a `Walker` whose `step` answers the simple events; None where the native module was not built.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import torch

from coexec._native import core
from coexec.runners.iteration import Iteration
from coexec.runners.placeholder import Symbol
from coexec.runners.records import EventRecord
from coexec.tracegraph import calls
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.graph import Captured, Fed, Node, NumberSlot, TraceGraph
from coexec.tracegraph.program import Program
from coexec.tracegraph.trace import Kind, Produced, TensorMeta

#: Objects that native code compares with, or makes.
NAMES = {
    "NewTensor": calls.NewTensor,
    "SameTensor": calls.SameTensor,
    "Container": calls.Container,
    "Opaque": calls.Opaque,
    "Tensor": torch.Tensor,
    "Symbol": Symbol,
    "EventRecord": EventRecord,
    "Iteration": Iteration,
}

_NUMBERS = {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
_NUMBERS |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def make_walker(
    graph: TraceGraph,
    program: Program,
    children: Mapping[int, tuple[Node, ...]],
    outputs: tuple[tuple[Produced, ...], ...],
    special: Container[int],
) -> Any:
    """A native walker for a graph; `outputs` are the interned bindings of its nodes' outputs.

    Nodes in `special` are left to Python.
    """
    if core is None:
        return None
    into: dict[int, dict[int, list[int]]] = {}
    for (source, target), messages in program.edges.items():
        into.setdefault(target, {})[source] = list(messages)
    itself = program.written | program.seen
    nodes = [
        _node(n, program, into.get(n.id, {}), outputs[n.id], n.id not in special, itself) for n in graph.nodes
    ]
    return core.Walker(nodes, {s: [n.id for n in t] for s, t in children.items()}, NAMES, ambient)


def _node(
    node: Node,
    program: Program,
    edges: dict[int, list[int]],
    outputs: tuple[Produced, ...],
    simple: bool,
    itself: Container[Captured | Fed],
) -> dict[str, Any]:
    key: Any = node.key
    plan = program.plans[node.id]
    return {
        "id": node.id,
        "location": node.location,
        "node": node,
        "function": node.function,
        "key": key[0],
        "ambient": key[1],
        "metas": [encoded_meta(m) for m in key[2]],
        "numbers": [encoded_slot(s) for s in node.numbers],
        "number_plans": list(plan.numbers),
        "alternatives": [
            {
                "bindings": a.bindings,
                "feeds": [
                    (i, i in plan.late, Fed(node.id, i) in itself)
                    for i in (plan.feeds[index] if plan.feeds else ())
                ],
                "select": -1 if plan.select is None else plan.select[index],
            }
            for index, a in enumerate(node.alternatives)
        ],
        "edges": edges,
        "output_metas": [encoded_meta(o.meta) for o in node.outputs],
        "output_bindings": list(outputs),
        "output_histories": [o.history for o in node.outputs],
        "result": node.result,
        "fetch": plan.fetches[0] if _is_item(node) else -1,
        "simple": simple and (_is_simple(node) or _is_item(node)),
    }


def _is_simple(node: Node) -> bool:
    """Whether an event needs nothing but comparing its arguments."""
    return node.kind is Kind.COMPUTE and _is_plain(node)


def _is_item(node: Node) -> bool:
    """Whether an event is `Tensor.item` of one number that Python has a type for."""
    if node.kind is not Kind.FETCH or node.function is not torch.Tensor.item or not _is_plain(node):
        return False
    key: Any = node.key
    [meta] = key[2]
    return math.prod(meta.shape) == 1 and meta.dtype in _NUMBERS


def _is_plain(node: Node) -> bool:
    special = node.backward or node.implicit_metas or node.rebinds or node.grads
    by_path = any(a.path is not None for a in node.alternatives)
    return not special and not by_path and bool(node.alternatives)


def encoded_meta(meta: TensorMeta) -> dict[str, Any]:
    """A tensor's metadata as the native code reads it."""
    return {
        "shape": list(meta.shape),
        "stride": list(meta.stride),
        "offset": meta.offset,
        "dtype": meta.dtype,
        "device": meta.device,
        "requires_grad": meta.requires_grad,
        "is_leaf": meta.is_leaf,
        "meta": meta,
    }


def encoded_slot(slot: NumberSlot) -> dict[str, Any]:
    """A number slot as the native code reads it."""
    classes = slot.classes or ()
    return {
        "value": slot.value,
        "varies": slot.classes is not None,
        "examples": [calls.example_of(c) for c in classes],
    }
