"""Fed numbers in compiled blocks: operations with a scalar argument, rewritten for a scalar tensor.

In:  an operation of which a scalar argument is a register (a number that varies).
Out: the same computation through operations that take tensors, the number in the type of the kernel.

A compiled block takes tensors only. Each rewrite is what the operation's documentation states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from coexec.executors.job import Unsupported
from coexec.executors.registers import Registers
from coexec.tracegraph.program import Call, Reg
from coexec.tracegraph.trace import Number, TensorMeta

aten = torch.ops.aten
Rewrite = Callable[[Graph, tuple[Any, ...]], Node]


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    return graph.call_function(target, args)


def _in_place(rewrite: Rewrite) -> Rewrite:
    def rewritten(graph: Graph, args: tuple[Any, ...]) -> Node:
        return _call(graph, aten.copy_.default, args[0], rewrite(graph, args))

    return rewritten


def _add(graph: Graph, args: tuple[Any, ...]) -> Node:
    x, other, alpha = args
    if isinstance(alpha, Node) or alpha != 1:
        other = _call(graph, aten.mul.Tensor, other, alpha)
    return _call(graph, aten.add.Tensor, x, other)


def _sub(graph: Graph, args: tuple[Any, ...]) -> Node:
    x, other, alpha = args
    if isinstance(alpha, Node) or alpha != 1:
        other = _call(graph, aten.mul.Tensor, other, alpha)
    return _call(graph, aten.sub.Tensor, x, other)


def _addcmul(graph: Graph, args: tuple[Any, ...]) -> Node:
    x, a, b, value = args
    product = _call(graph, aten.mul.Tensor, _call(graph, aten.mul.Tensor, a, b), value)
    return _call(graph, aten.add.Tensor, x, product)


def _addcdiv(graph: Graph, args: tuple[Any, ...]) -> Node:
    x, a, b, value = args
    quotient = _call(graph, aten.mul.Tensor, _call(graph, aten.div.Tensor, a, b), value)
    return _call(graph, aten.add.Tensor, x, quotient)


def _lerp(graph: Graph, args: tuple[Any, ...]) -> Node:
    x, end, weight = args
    step = _call(graph, aten.mul.Tensor, _call(graph, aten.sub.Tensor, end, x), weight)
    return _call(graph, aten.add.Tensor, x, step)


def _fill(graph: Graph, args: tuple[Any, ...]) -> Node:
    return _call(graph, aten.fill.Tensor, args[0], args[1])


def _same(target: Any) -> Rewrite:
    return lambda graph, args: _call(graph, target, *args)


#: By name of the overload; in-place variants are added below.
REWRITES: dict[Any, Rewrite] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.mul.Tensor: _same(aten.mul.Tensor),
    aten.mul.Scalar: _same(aten.mul.Tensor),
    aten.div.Tensor: _same(aten.div.Tensor),
    aten.div.Scalar: _same(aten.div.Tensor),
    aten.pow.Tensor_Scalar: _same(aten.pow.Tensor_Tensor),
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Scalar: _lerp,
    aten.fill.Scalar: _fill,
    aten.maximum.default: _same(aten.maximum.default),
    aten.minimum.default: _same(aten.minimum.default),
    aten.eq.Scalar: _same(aten.eq.Tensor),
    aten.gt.Scalar: _same(aten.gt.Tensor),
    aten.ge.Scalar: _same(aten.ge.Tensor),
    aten.lt.Scalar: _same(aten.lt.Tensor),
    aten.le.Scalar: _same(aten.le.Tensor),
}

_IN_PLACE = {
    aten.add_.Tensor: _add,
    aten.add_.Scalar: _add,
    aten.sub_.Tensor: _sub,
    aten.sub_.Scalar: _sub,
    aten.mul_.Tensor: REWRITES[aten.mul.Tensor],
    aten.mul_.Scalar: REWRITES[aten.mul.Tensor],
    aten.div_.Tensor: REWRITES[aten.div.Tensor],
    aten.div_.Scalar: REWRITES[aten.div.Tensor],
    aten.addcmul_.default: _addcmul,
    aten.addcdiv_.default: _addcdiv,
    aten.lerp_.Scalar: _lerp,
    aten.fill_.Scalar: _fill,
}
REWRITES |= {target: _in_place(rewrite) for target, rewrite in _IN_PLACE.items()}


def _each(name: str, base: str, *defaults: Any) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """The in-place and the other variant of an operation on lists, with what does it to one tensor."""
    found = {}
    for suffix in ("", "_"):
        packet, _, overload = name.partition(".")
        target, _, own = base.partition(".")
        of = getattr(getattr(aten, f"_foreach_{packet}{suffix}"), overload, None)
        one = getattr(getattr(aten, f"{target}{suffix}"), own)
        if of is not None and one in REWRITES:
            found[of] = (one, defaults)
    return found


#: Operations on lists of tensors: what does it to one of them, and arguments that this one has besides.
FOREACH: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    of: one
    for kind in ("Scalar", "ScalarList")
    for found in (
        _each(f"add.{kind}", "add.Scalar", 1),
        _each(f"sub.{kind}", "sub.Scalar", 1),
        _each(f"mul.{kind}", "mul.Scalar"),
        _each(f"div.{kind}", "div.Scalar"),
        _each(f"addcmul.{kind}", "addcmul.default"),
        _each(f"addcdiv.{kind}", "addcdiv.default"),
        _each("add.List", "add.Tensor"),
        _each("sub.List", "sub.Tensor"),
        _each("lerp.Scalar", "lerp.Scalar"),
    )
    for of, one in found.items()
}


def rewritten_foreach(graph: Graph, target: Any, args: tuple[Any, ...]) -> list[Node]:
    """An operation on lists of tensors, done to one after the other."""
    one, defaults = FOREACH[target]
    return [
        REWRITES[one](graph, (*(a[i] if isinstance(a, list) else a for a in args), *defaults))
        for i in range(len(args[0]))
    ]


def typed(graph: Graph, call: Call, registers: Registers, encoded: list[Any]) -> list[Any]:
    """The arguments, with numbers in the types in which kernels compute with them.

    A number does not decide about the type of a result as a tensor without dimensions would.
    """
    out = []
    metas = _metas_of(call, registers)
    if len({m.dtype for m in metas}) != 1:
        raise Unsupported(f"a varying number in {call.target}")
    for declared, argument, node in zip(call.target._schema.arguments, call.args, encoded, strict=True):
        if not registers.holds_number(argument):
            out.append(node)
            continue
        several = isinstance(argument, tuple)
        nodes = [
            _typed_one(graph, one, call, declared.name, meta, registers, number)
            for one, meta, number in zip(
                node if several else [node], metas, argument if several else [argument], strict=False
            )
        ]
        out.append(nodes if several else nodes[0])
    return out


def _metas_of(call: Call, registers: Registers) -> list[TensorMeta]:
    """Of a call with numbers that vary, the first argument; of one on lists, those in it."""
    first = call.args[0] if isinstance(call.args[0], tuple) else (call.args[0],)
    metas = registers.program.metas
    return [metas[r.index] for r in first if isinstance(r, Reg) and r.index in metas]


def _typed_one(
    graph: Graph, node: Any, call: Call, name: str, meta: TensorMeta, registers: Registers, number: Any
) -> Any:
    if not isinstance(node, Node):
        return node
    metas = registers.program.metas
    dtype = torch.result_type(torch.empty((), dtype=meta.dtype), registers.numbers[number.index])
    if name in _OF_THE_RESULT:
        made = [metas[o].dtype for o in call.outs if o is not None and o in metas]
        dtype = made[0] if made else meta.dtype
    if dtype is torch.bfloat16 and meta.shape:
        dtype = torch.float32  # in which kernels compute
    if dtype in _NARROW:
        raise Unsupported(f"a varying number in {call.target} of {dtype}, in which it may not fit")
    return graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})


#: Arguments of the type of the result, whatever the type of the first tensor is.
_OF_THE_RESULT = {"alpha", "value", "weight"}
#: Kernels check whether a number fits; a conversion does not.
_NARROW = {torch.float16, torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool}


def dtype_of(number: Number) -> torch.dtype:
    """The type of the tensor that a number which varies is handed over in."""
    return torch.float64 if isinstance(number, float) else torch.int64
