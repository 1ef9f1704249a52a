"""A block as an FX graph of ATen operations, with its registers.

In:  a stretch of instructions of a program.
Out: what TorchInductor compiles: their graph, what it reads and what it computes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from coexec._native import core
from coexec.executors.aliases import lost_draws, written_by
from coexec.executors.draws import emit_bernoulli, is_bernoulli
from coexec.executors.job import TOKEN, InputMeta, Job, SymbolInput, Unsupported, make_job
from coexec.executors.registers import Registers
from coexec.executors.scalars import (
    FOREACH,
    REWRITES,
    dtype_of,
    rewritten_foreach,
    typed,
)
from coexec.executors.sizes import SizeNodes, symbols_of
from coexec.tracegraph.instructions import reads, writes
from coexec.tracegraph.numbers import is_number
from coexec.tracegraph.program import Call, Feed, Fetch, Given, Instruction, Move, Reg, When
from coexec.tracegraph.random_state import OPERATIONS
from coexec.tracegraph.schema import by_schema
from coexec.tracegraph.sizes import Size, varies
from coexec.tracegraph.trace import TensorMeta, with_leaves

_CHECKS_INDICES = {
    getattr(torch.ops.aten, name)
    for name in ("index_select", "index_add", "index_add_", "index_copy", "index_copy_")
}
#: What a block has to have computed before it waits for what Python feeds later: a compiler knows no reason.
_LONG = {
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}
#: Without a functional variant, or without one for tensors that have no memory.
_NEVER_COMPILED = {
    getattr(torch.ops.aten, name, None)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
} | OPERATIONS


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block as an FX graph of ATen operations, with its registers.

    Attributes:
        module: the graph.
        sources: registers that it reads, after the token.
        outs: registers that it computes.
        operations: how many it has.
        symbols: those in its sizes; it gets a tensor of as many elements for each, before the registers.
        inputs: what it gets.
        given: what it takes for granted of the registers, in the program's symbols.
        metas: what its results are.
        random: whether it draws random numbers.
        when: whether it waits for the commit.
        written: registers whose memory it writes then.
    """

    module: GraphModule
    sources: tuple[int, ...]
    outs: tuple[int, ...]
    operations: int
    symbols: tuple[int, ...]
    inputs: tuple[InputMeta | SymbolInput, ...]
    given: tuple[Given, ...]
    metas: tuple[TensorMeta | None, ...]
    random: bool
    when: When
    written: tuple[int, ...]


def make_block(
    registers: Registers, body: Iterable[Instruction], needed: set[int], when: When = When.NOW
) -> Block:
    """The FX graph of a stretch of instructions; `needed` are the registers that others read."""
    program, views = registers.program, registers.views
    graph = Graph()
    constants: dict[str, torch.Tensor] = {}
    env: dict[int, Node] = {}
    sources: list[int] = []
    defined: list[int] = []
    body = list(body)
    token = latest = drawn = graph.placeholder("token")
    draws = [i for i in body if isinstance(i, Call) and i.random]
    own_draws = all(is_bernoulli(d, program) for d in draws)
    symbols = symbols_of(body, program)
    sizes = SizeNodes(graph, symbols)
    inside = {r for i in body for r in writes(i)}
    for register in dict.fromkeys(r for i in body for r in reads(i)):
        if register not in inside:
            env[register] = graph.placeholder(f"r{register}")
            sources.append(register)

    def leaf(argument: Any) -> Any:
        if isinstance(argument, Reg):
            return env[argument.index]
        if isinstance(argument, Size):
            return sizes(argument)
        if isinstance(argument, torch.Generator):
            raise Unsupported("an operation with a generator of its own")
        if isinstance(argument, torch.Tensor):
            name = f"constant{len(constants)}"
            constants[name] = argument
            return graph.get_attr(name)
        return argument

    encode = partial(with_leaves, leaf=leaf, sequence=list)
    for instruction in body:
        match instruction:
            case Call(random=True) if own_draws:
                drawn = emit_bernoulli(graph, drawn, instruction, program, env, sizes)
            case Call():
                _emit_call(graph, instruction, registers, env, encode)
                if instruction.target in _LONG and instruction.outs[0] is not None:
                    latest = env[instruction.outs[0]]
            case Feed():
                token, env[instruction.out] = _emit_feed(graph, token, latest, instruction, sizes)
            case Fetch():
                value = env[instruction.source]
                token = graph.call_function(torch.ops.coexec.fetch.default, (token, value, instruction.slot))
            case Move():
                for out, source in zip(instruction.outs, instruction.sources, strict=True):
                    env[out] = env[source]
        defined += writes(instruction)
    needed = needed | lost_draws(body, needed, views)
    outs = tuple(r for r in dict.fromkeys(defined) if r in needed and r in env)
    graph.output((token, *(env[r] for r in outs)))
    module = GraphModule(dict(constants), graph)
    local = {symbol: index for index, symbol in enumerate(symbols)}
    inputs: list[InputMeta | SymbolInput] = [TOKEN, *(SymbolInput.of(program.symbols[s]) for s in symbols)]
    given = tuple([_given(r, registers) for r in sources])
    inputs += [InputMeta.of(g, local) for g in given]
    calls = [i for i in body if isinstance(i, Call)]
    random = any(c.random for c in calls)
    metas = tuple(program.metas.get(r) for r in outs)
    roots = (m for c in calls for r in written_by(c) for m in (r, *views.get(r, ())))
    written = tuple(dict.fromkeys(m for m in roots if m in sources))
    return Block(
        module, tuple(sources), outs, len(calls), symbols, tuple(inputs), given, metas, random, when, written
    )


def is_compiled(instruction: Instruction, registers: Registers) -> bool:
    """Whether a library can hold an instruction; most calls of ATen's it can."""
    if not isinstance(instruction, Call):
        return True
    target = instruction.target.overloadpacket
    if not (
        registers.holds_number(instruction.args) or varies(instruction.args) or target in _NEVER_COMPILED
    ):
        return True
    try:
        make_block(registers, [instruction], set())
    except Unsupported:
        return False
    return True


def _given(register: int, registers: Registers) -> Given:
    if register in registers.numbers:
        return Given((), (), dtype_of(registers.numbers[register]), torch.device("cpu"))
    meta = registers.program.metas.get(register)
    if meta is None:
        raise Unsupported("sizes of an argument that other calls make on other paths are not known")
    return Given(meta.shape, meta.stride, meta.dtype, meta.device)


def _emit_call(graph: Graph, call: Call, registers: Registers, env: dict[int, Node], encode: Any) -> None:
    if call.target.overloadpacket in _NEVER_COMPILED:
        raise Unsupported(f"{call.target} is a kernel of its own")
    target, args = _with_sizes_as_scalars(*_with_declared_writes(call))
    if target.overloadpacket in _CHECKS_INDICES:
        _emit_check(graph, encode(args[2]))
    encoded = [encode(a) for a in args]
    if registers.holds_number(args):
        encoded = typed(graph, call, registers, encoded)
        if target in FOREACH:
            each = rewritten_foreach(graph, target, tuple(encoded))
            env.update((out, made) for out, made in zip(call.outs, each, strict=False) if out is not None)
            return
        if target not in REWRITES:
            raise Unsupported(f"a varying number in {target}")
        result = REWRITES[target](graph, tuple(encoded))
    else:
        positional, keywords = by_schema(target, encoded)
        result = graph.call_function(target, tuple(positional), keywords)
    if len(target._schema.returns) == 1 and str(target._schema.returns[0].type) == "Tensor":
        if call.outs and call.outs[0] is not None:
            env[call.outs[0]] = result
        return
    for index, out in enumerate(call.outs):
        if out is not None:
            env[out] = graph.call_function(operator.getitem, (result, index))


def _emit_feed(graph: Graph, token: Node, after: Node, feed: Feed, sizes: SizeNodes) -> tuple[Node, Node]:
    if is_number(feed.example):
        dtype, device = dtype_of(feed.example), torch.device("cpu")
        geometry, varies = sizes.geometry((), ())
    else:
        meta: TensorMeta = feed.example
        dtype, device = meta.dtype, meta.device
        geometry, varies = sizes.geometry(meta.shape, meta.stride)
    pair = graph.call_function(
        torch.ops.coexec.feed_of_any_size.default if varies else torch.ops.coexec.feed.default,
        (token, after, geometry, core.scalar_type(dtype), device),
    )
    return graph.call_function(operator.getitem, (pair, 0)), graph.call_function(operator.getitem, (pair, 1))


def _with_declared_writes(call: Call) -> tuple[Any, tuple[Any, ...]]:
    """Batch norm in the variant whose schema says that it writes the running statistics."""
    if call.target is torch.ops.aten.native_batch_norm.default and call.args[5]:
        if call.args[3] is not None and call.args[4] is not None:
            return torch.ops.aten._native_batch_norm_legit.default, call.args
        return torch.ops.aten._native_batch_norm_legit.no_stats, (*call.args[:3], *call.args[5:])
    return call.target, call.args


def _with_sizes_as_scalars(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The overload that takes a number, where a size is in a tensor's place."""
    kinds = [str(a.type) for a in target._schema.arguments]
    if not any(isinstance(a, Size) and kind == "Tensor" for a, kind in zip(args, kinds, strict=True)):
        return target, args
    if target._overloadname != "Tensor" or "Scalar" not in target.overloadpacket.overloads():
        raise Unsupported(f"a size in the place of a tensor in {target}")
    return target.overloadpacket.Scalar, args


def _emit_check(graph: Graph, index: Node) -> None:
    """Kernels refuse negative indices here, where compiled code would count from the end."""
    inside = graph.call_function(torch.ops.aten.ge.Scalar, (index, 0))
    every = graph.call_function(torch.ops.aten.all.default, (inside,))
    graph.call_function(torch.ops.aten._assert_async.msg, (every, "an index is negative"))


def job_of(block: Block) -> Job:
    """What has to be compiled for a block."""
    return make_job(block.module, block.inputs)
