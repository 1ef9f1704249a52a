"""The native hot path of the PythonRunner, prepared from a skeleton.

In:  a TraceGraph with interned parts, and its program.
Out: a `Walker` that can be a mode's `__torch_function__`, and leaves to Python what is not simple; None
     where the native module was not built.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping
from types import MethodWrapperType
from typing import Any

import torch

from coexec._native import core
from coexec._private import operator_methods
from coexec.runners.iteration import Iteration
from coexec.runners.placeholder import Symbol
from coexec.runners.records import EventRecord, GradRecord
from coexec.runners.sizes import encoded
from coexec.runners.unseen import Unseen
from coexec.tracegraph import calls, functions
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.callbacks import UNRETURNED
from coexec.tracegraph.graph import Captured, Fed, Node, NumberSlot, TraceGraph, step_of
from coexec.tracegraph.optimizers import counts_of
from coexec.tracegraph.program import Program
from coexec.tracegraph.trace import Kind, Produced, TensorMeta

#: What is done with functions that are no events: called as they are, except that placeholders know best
#: whether they are leaves, and which gradients there are.
_CALLED, _ANNOTATES, _IS_LEAF, _GET_GRAD, _SET_GRAD = range(5)
_TREATMENTS: dict[Any, int] = {
    **dict.fromkeys(functions.PASSIVE | functions.AMBIENT | functions.MARKS, _CALLED),
    **dict.fromkeys(functions.ANNOTATIONS, _ANNOTATES),
    functions.IS_LEAF: _IS_LEAF,
    functions.GET_GRAD: _GET_GRAD,
    functions.SET_GRAD: _SET_GRAD,
    functions.DELETE_GRAD: _SET_GRAD,
}

#: What a fetch of numbers gives Python: the number that a tensor holds, as what it was asked for, or a list
#: of floats.
_ITEM, _LIST, _BOOL, _FLOAT, _INT = range(5)
_LOOKS: dict[Any, int] = {
    torch.Tensor.item: _ITEM,
    counts_of: _LIST,
    torch.Tensor.__bool__: _BOOL,
    torch.Tensor.__float__: _FLOAT,
    torch.Tensor.__int__: _INT,
}

#: Objects that native code compares with, or makes.
NAMES = {
    "NewTensor": calls.NewTensor,
    "SameTensor": calls.SameTensor,
    "Container": calls.Container,
    "Opaque": calls.Opaque,
    "Tensor": torch.Tensor,
    "Symbol": Symbol,
    "EventRecord": EventRecord,
    "GradRecord": GradRecord,
    "Produced": Produced,
    "treatments": _TREATMENTS,
    "Iteration": Iteration,
    "TensorMeta": TensorMeta,
}

_NUMBERS = {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
_NUMBERS |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def make_walker(
    graph: TraceGraph,
    program: Program,
    children: Mapping[int, tuple[Node, ...]],
    outputs: tuple[tuple[Produced, ...], ...],
    special: Container[int],
    unseen: Unseen,
) -> Any:
    """A native walker for a graph; `outputs` are the interned bindings of its nodes' outputs.

    Nodes in `special` are left to Python; `unseen` knows sizes that they have not been seen with.
    """
    if core is None:
        return None
    _shorten(n.function for n in graph.nodes)
    into: dict[int, dict[int, list[int]]] = {}
    for (source, target), messages in program.edges.items():
        into.setdefault(target, {})[source] = list(messages)
    itself = program.written | program.seen
    nodes = [
        _node(n, program, into.get(n.id, {}), outputs[n.id], n.id not in special, itself)
        | {
            "watched": [encoded(s) for s in unseen.watched.get(n.id, ())],
            "known": unseen.known.get(n.id, set()),
        }
        for n in graph.nodes
    ]
    ranges = [(s.low, s.high) for s in graph.symbols]
    following = {s: [n.id for n in t] for s, t in children.items()}
    return core.Walker(nodes, following, NAMES, ambient, ranges)


def _shorten(functions: Iterable[Any]) -> None:
    """Has calls of these functions, and of those that are no events, reach the walker on a short way."""
    known = itertools.chain(functions, _TREATMENTS, operator_methods())
    # The getters among them (`Tensor.shape.__get__`) are of a property.
    core.shorten([f.__self__ if isinstance(f, MethodWrapperType) else f for f in known])


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
                "path": a.path,
                "step": step_of(node.id, a.number),
                "after": -1 if a.after is None else a.after,
                "select": -1 if plan.select is None else plan.select[index],
            }
            for index, a in enumerate(node.alternatives)
        ],
        "edges": edges,
        "output_metas": [encoded_meta(o.meta) for o in node.outputs],
        "output_bindings": list(outputs),
        "output_histories": [o.history for o in node.outputs],
        "plain": [
            -1
            if (node.id, number) in program.rebased or node.outputs[number].meta.requires_grad
            else register
            for number, register in enumerate(plan.outputs)
        ],
        "rebinds": [(output, argument) for argument, output in node.rebinds],
        "result": node.result,
        "returned": node.result.index if isinstance(node.result, calls.NewTensor) else -1,
        "fetches": list(plan.fetches) if _looks_at_numbers(node) else [],
        "grads": [(g.leaf, g.output) for g in node.grads],
        "backward": node.backward,
        "looks": _LOOKS.get(node.function, _ITEM),
        "simple": simple and not plan.asks and (_is_simple(node) or _looks_at_numbers(node)),
    }


def _is_simple(node: Node) -> bool:
    """Whether an event needs nothing but comparing its arguments."""
    return node.kind is Kind.COMPUTE and node.piece is None and _is_plain(node) and _returns(node)


def _returns(node: Node) -> bool:
    """Whether a call returns to its caller, and nothing has to be done before."""
    return not (isinstance(node.result, calls.Container) and node.result.kind in UNRETURNED)


def _looks_at_numbers(node: Node) -> bool:
    """Whether an event gives Python single numbers, of types that Python has."""
    if node.kind is not Kind.FETCH or node.function not in _LOOKS:
        return False
    key: Any = node.key
    return _is_plain(node) and all(
        not m.is_symbolic and math.prod(m.shape) == 1 and m.dtype in _NUMBERS for m in key[2]
    )


def _is_plain(node: Node) -> bool:
    """Whether an event binds nothing that only Python knows how to bind."""
    key: Any = node.key
    explicit = len(key[2])
    fed_late = any(
        isinstance(b, Fed) and b == Fed(node.id, position)
        for a in node.alternatives
        for position, b in enumerate(a.bindings[explicit:], explicit)
    )
    same = all(key[2][argument] == node.outputs[output].meta for argument, output in node.rebinds)
    return same and not fed_late and not any(a.pins for a in node.alternatives)


def encoded_meta(meta: TensorMeta) -> dict[str, Any]:
    """A tensor's metadata as the native code reads it."""
    return {
        "shape": [encoded(s) for s in meta.shape],
        "stride": [encoded(s) for s in meta.stride],
        "offset": encoded(meta.offset),
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
        "value": encoded(slot.value),
        "varies": slot.classes is not None,
        "examples": [calls.example_of(c) for c in classes],
    }
