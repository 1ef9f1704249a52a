"""The inductor executor: every basic block is one library, compiled ahead of time by TorchInductor.

In:  a TraceGraph, lowered for a compiler.
Out: the program with each block's instructions replaced by one `Compiled`, and another one for what the block
     puts off to the commit, which writes external tensors in place. Or the blocks that are not compiled yet.

Inside of a block, feeds and fetches are operators. A token passed from each to the next keeps them in
program order, which is what makes the two runners free of deadlock (Terra, figure 3.4).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from coexec._native import core
from coexec.executors.aliases import lost_draws, share_across, views_in, written_by
from coexec.executors.commit_block import is_apart, is_late
from coexec.executors.job import (
    TOKEN,
    InputMeta,
    Job,
    SymbolInput,
    Unsupported,
    compiled,
    kernel_threads,
    make_job,
)
from coexec.executors.scalars import FOREACH, REWRITES, rewritten_foreach
from coexec.executors.sizes import SizeNodes, before_late_symbols, symbols_of
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.instructions import at_commit, reads, retargeted, writes
from coexec.tracegraph.numbers import is_number
from coexec.tracegraph.program import (
    Call,
    Compiled,
    CompiledBlock,
    Feed,
    Fetch,
    Instruction,
    Move,
    Program,
    Reg,
    When,
)
from coexec.tracegraph.sizes import Size, varies
from coexec.tracegraph.symbolic import SharedShadow, lower
from coexec.tracegraph.trace import Number, TensorMeta

log = logging.getLogger(__name__)

_CHECKS_INDICES = {
    getattr(torch.ops.aten, name)
    for name in ("index_select", "index_add", "index_add_", "index_copy", "index_copy_")
}
#: Without a functional variant, or without one for tensors that have no memory.
_NEVER_COMPILED = {
    getattr(torch.ops.aten, name, None)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
}


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
    metas: tuple[TensorMeta | None, ...]
    random: bool
    when: When
    written: tuple[int, ...]


Part = Instruction | Block


def lowered(graph: TraceGraph) -> Program:
    """The program that is compiled: one that puts writes off to the commit, or one that writes to copies.

    Raises:
        SharedShadow: if external tensors that share memory are written.
    """
    try:
        program = lower(graph, compiled=True)
        if is_apart(program):
            return program
    except SharedShadow:  # there may be a shadow to tell by whether a result views an external tensor
        pass
    return lower(graph, compiled=True, defer=False)


def compile_blocks(graph: TraceGraph) -> Program:
    """Compiles every block of a program that is not on disk.

    Raises:
        SharedShadow: if external tensors that share memory are written.
        Unsupported: if the native GraphRunner is missing, or a block cannot be compiled.
    """
    if core is None:
        raise Unsupported("compiled blocks need the native GraphRunner, which was not built")
    program = lowered(graph)
    parts = _parts(program)
    linked = {first: [_linked(part) for part in made] for first, made in parts.items()}
    made = tuple(block for part in parts.values() for block in _described(part))
    whole = _spliced(program, linked)
    return replace(whole, compiled=made, uncompiled=program.instructions, threads=kernel_threads())


def jobs(graph: TraceGraph) -> list[Job]:
    """The blocks of a program that are not on disk.

    Raises:
        SharedShadow: if external tensors that share memory are written.
        Unsupported: if a block cannot be compiled.
    """
    found = [job_of(block) for block in _blocks(_parts(lowered(graph)))]
    return [job for job in found if not job.path.exists()]


def _parts(program: Program) -> dict[int, list[Part]]:
    """By its first instruction, what each block of the program becomes."""
    if program.asks:
        raise Unsupported("a library is compiled for sizes, and values decide about some")
    if any(r.shadow is not None for r in program.rebased.values()):
        raise Unsupported("a result views an external tensor on some paths only")
    outside = _uses_outside(program)
    units: list[list[Instruction]] = []
    written = {r for i in program.instructions if at_commit(i) for r in reads(i)}
    parts: dict[int, list[Part]] = {}
    for first, end in program.blocks:
        instructions = program.instructions[first:end]
        late = [i for i in instructions if is_late(i)]
        last = [i for i in instructions if at_commit(i) and not is_late(i)]
        body = [i for i in instructions if not is_late(i) and not at_commit(i)]
        at_the_end = {r for i in (*late, *last) for r in reads(i)}
        stretches = [
            part for s in _between_written_feeds(body, written) for part in before_late_symbols(s, program)
        ]
        made: list[Part] = []
        for position, stretch in enumerate(stretches):
            if not _is_worth_compiling(stretch, written):
                made += (replace(i, release=()) for i in stretch)
                continue
            later = {r for s in stretches[position + 1 :] for i in s for r in reads(i)}
            made.append(make_block(program, stretch, outside[first] | later | at_the_end))
            units.append(stretch)
        # Numbers first: libraries wait for nothing at the commit.
        made += (replace(i, release=()) for i in late if isinstance(i, Feed))
        calls = [i for i in late if isinstance(i, Call)]
        if calls:
            needed = outside[first].union(*(reads(i) for i in last))
            made += _commit_block(program, calls, needed)
        parts[first] = [*made, *(replace(i, release=()) for i in last)]
        units.append(list(calls))
    if share_across(program, units):
        raise Unsupported("memory that is written is known by several names outside of a block")
    return parts


def _commit_block(program: Program, calls: list[Call], needed: set[int]) -> list[Part]:
    """What is put off as a block, or as it is where it cannot be compiled."""
    try:
        return [make_block(program, calls, needed, When.COMMIT)]
    except Unsupported as error:
        log.info("%d operations at the commit run by aten: %s", len(calls), error)
        return [replace(call, release=()) for call in calls]


def _blocks(parts: dict[int, list[Part]]) -> list[Block]:
    return [part for made in parts.values() for part in made if isinstance(part, Block)]


def _described(parts: list[Part]) -> Iterator[CompiledBlock]:
    for part in parts:
        if isinstance(part, Block):
            late = part.operations if part.when is When.COMMIT else 0
            yield CompiledBlock(part.operations, late, "inductor")
    left = sum(isinstance(part, Call) and is_late(part) for part in parts)
    if left:
        yield CompiledBlock(left, left, "aten")


def _linked(part: Part) -> Instruction:
    if not isinstance(part, Block):
        return part
    library = core.Library(str(compiled(job_of(part))))
    shapes = tuple(m.shape if m is not None and varies(m.shape) else None for m in part.metas)
    return Compiled(
        library,
        part.sources,
        part.outs,
        random=part.random,
        symbols=part.symbols,
        shapes=shapes,
        dtypes=tuple(None if m is None else m.dtype for m in part.metas),
        when=part.when,
        written=part.written,
    )


def _between_written_feeds(body: list[Instruction], written: set[int]) -> list[list[Instruction]]:
    """Parts a block at feeds of tensors that the commit writes: a library gets copies of what it is fed."""
    stretches: list[list[Instruction]] = [[]]
    for instruction in body:
        if _is_written_feed(instruction, written):
            stretches += [[instruction], []]
        else:
            stretches[-1].append(instruction)
    return [stretch for stretch in stretches if stretch]


def _is_written_feed(instruction: Instruction, written: set[int]) -> bool:
    return isinstance(instruction, Feed) and instruction.out in written


def _is_worth_compiling(stretch: list[Instruction], written: set[int]) -> bool:
    if _is_written_feed(stretch[0], written):
        return False
    return any(isinstance(i, (Call, Feed, Fetch)) for i in stretch)


def make_block(
    program: Program, body: Iterable[Instruction], needed: set[int], when: When = When.NOW
) -> Block:
    """The FX graph of a stretch of instructions; `needed` are the registers that others read."""
    graph = Graph()
    constants: dict[str, torch.Tensor] = {}
    env: dict[int, Node] = {}
    sources: list[int] = []
    defined: list[int] = []
    body = list(body)
    token = graph.placeholder("token")
    symbols = symbols_of(body, program)
    sizes = SizeNodes(graph, symbols)
    inside = {r for i in body for r in writes(i)}
    for register in dict.fromkeys(r for i in body for r in reads(i)):
        if register not in inside:
            env[register] = graph.placeholder(f"r{register}")
            sources.append(register)

    def encode(argument: Any) -> Any:
        if isinstance(argument, Reg):
            return env[argument.index]
        if isinstance(argument, Size):
            return sizes(argument)
        if isinstance(argument, tuple):
            return [encode(a) for a in argument]
        if isinstance(argument, torch.Generator):
            raise Unsupported("an operation with a generator of its own")
        if isinstance(argument, torch.Tensor):
            name = f"constant{len(constants)}"
            constants[name] = argument
            return graph.get_attr(name)
        return argument

    for instruction in body:
        match instruction:
            case Call():
                _emit_call(graph, instruction, program, env, encode)
            case Feed():
                token, env[instruction.out] = _emit_feed(graph, token, instruction, sizes)
            case Fetch():
                value = env[instruction.source]
                token = graph.call_function(torch.ops.coexec.fetch.default, (token, value, instruction.slot))
            case Move():
                for out, source in zip(instruction.outs, instruction.sources, strict=True):
                    env[out] = env[source]
        defined += writes(instruction)
    views = views_in(program)
    needed = needed | lost_draws(body, needed, views)
    outs = tuple(r for r in dict.fromkeys(defined) if r in needed and r in env)
    graph.output((token, *(env[r] for r in outs)))
    module = GraphModule(dict(constants), graph)
    local = {symbol: index for index, symbol in enumerate(symbols)}
    inputs: list[InputMeta | SymbolInput] = [TOKEN, *(SymbolInput.of(program.symbols[s]) for s in symbols)]
    inputs += [_input_meta(r, program, local) for r in sources]
    calls = [i for i in body if isinstance(i, Call)]
    random = any(c.random for c in calls)
    metas = tuple(program.metas.get(r) for r in outs)
    roots = (m for c in calls for r in written_by(c) for m in (r, *views.get(r, ())))
    written = tuple(dict.fromkeys(m for m in roots if m in sources))
    return Block(
        module, tuple(sources), outs, len(calls), symbols, tuple(inputs), metas, random, when, written
    )


def _input_meta(register: int, program: Program, symbols: Mapping[int, int]) -> InputMeta:
    meta = program.metas.get(register)
    if meta is not None:
        return InputMeta.of(meta, symbols)
    [number] = {type(i.example) for i in program.instructions if isinstance(i, Feed) and i.out == register}
    return InputMeta((), (), _dtype_of(number), "cpu")


def _dtype_of(number: type[Number]) -> torch.dtype:
    return torch.float64 if number is float else torch.int64


def _emit_call(graph: Graph, call: Call, program: Program, env: dict[int, Node], encode: Any) -> None:
    if call.target.overloadpacket in _NEVER_COMPILED:
        raise Unsupported(f"{call.target} is a kernel of its own")
    target, args = _with_sizes_as_scalars(*_with_declared_writes(call))
    if target.overloadpacket in _CHECKS_INDICES:
        _emit_check(graph, env[args[2].index])
    numbers = [_is_number(a, program) for a in args]
    encoded = [encode(a) for a in args]
    if any(numbers):
        encoded = _with_types_of_numbers(graph, call, program, encoded)
        if target in FOREACH:
            each = rewritten_foreach(graph, target, tuple(encoded))
            env.update((out, made) for out, made in zip(call.outs, each, strict=False) if out is not None)
            return
        if target not in REWRITES:
            raise Unsupported(f"a varying number in {target}")
        result = REWRITES[target](graph, tuple(encoded))
    else:
        positional, keywords = [], {}
        for argument, value in zip(target._schema.arguments, encoded, strict=True):
            if not argument.kwarg_only:
                positional.append(value)
            elif value != argument.default_value or isinstance(value, Node):
                keywords[argument.name] = value
        result = graph.call_function(target, tuple(positional), keywords)
    if len(target._schema.returns) == 1 and str(target._schema.returns[0].type) == "Tensor":
        if call.outs and call.outs[0] is not None:
            env[call.outs[0]] = result
        return
    for index, out in enumerate(call.outs):
        if out is not None:
            env[out] = graph.call_function(operator.getitem, (result, index))


def _emit_feed(graph: Graph, token: Node, feed: Feed, sizes: SizeNodes) -> tuple[Node, Node]:
    if is_number(feed.example):
        dtype = _dtype_of(type(feed.example))
        size, stride, device = [], [], torch.device("cpu")
    else:
        meta: TensorMeta = feed.example
        size, stride, dtype, device = sizes.all(meta.shape), sizes.all(meta.stride), meta.dtype, meta.device
    varies = any(isinstance(n, Node) for n in (*size, *stride))
    pair = graph.call_function(
        torch.ops.coexec.feed_of_any_size.default if varies else torch.ops.coexec.feed.default,
        (token, [len(size), *size, *stride], core.scalar_type(dtype), device),
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


def _is_number(argument: Any, program: Program) -> bool:
    """Whether an argument is a number that varies, or a list with one."""
    if isinstance(argument, tuple):
        return any(_is_number(a, program) for a in argument)
    return isinstance(argument, Reg) and argument.index not in program.metas


def _with_types_of_numbers(graph: Graph, call: Call, program: Program, encoded: list[Any]) -> list[Any]:
    """The arguments, with numbers in the types in which kernels compute with them.

    A number does not decide about the type of a result as a tensor without dimensions would.
    """
    out = []
    metas = _metas_of(call, program)
    if len({m.dtype for m in metas}) != 1:
        raise Unsupported(f"a varying number in {call.target}")
    for declared, argument, node in zip(call.target._schema.arguments, call.args, encoded, strict=True):
        if not _is_number(argument, program):
            out.append(node)
            continue
        several = isinstance(argument, tuple)
        nodes = [
            _typed(graph, one, call, declared.name, meta, program, number)
            for one, meta, number in zip(
                node if several else [node], metas, argument if several else [argument], strict=False
            )
        ]
        out.append(nodes if several else nodes[0])
    return out


def _metas_of(call: Call, program: Program) -> list[TensorMeta]:
    """Of a call with numbers that vary, the first argument; of one on lists, those in it."""
    first = call.args[0] if isinstance(call.args[0], tuple) else (call.args[0],)
    return [program.metas[r.index] for r in first if isinstance(r, Reg) and r.index in program.metas]


def _typed(
    graph: Graph, node: Any, call: Call, name: str, meta: TensorMeta, program: Program, number: Any
) -> Any:
    if not isinstance(node, Node):
        return node
    example = next(i.example for i in program.sent_to if isinstance(i, Feed) and i.out == number.index)
    dtype = torch.result_type(torch.empty((), dtype=meta.dtype), example)
    if name in (
        "alpha",
        "value",
        "weight",
    ):  # these are of the result's type, whatever the first argument's is
        made = [program.metas[o].dtype for o in call.outs if o is not None and o in program.metas]
        dtype = made[0] if made else meta.dtype
    if dtype is torch.bfloat16 and meta.shape:
        dtype = torch.float32  # in which kernels compute
    if dtype in _NARROW:
        raise Unsupported(f"a varying number in {call.target} of {dtype}, in which it may not fit")
    return graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})


#: Kernels check whether a number fits; a conversion does not.
_NARROW = {torch.float16, torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool}


def job_of(block: Block) -> Job:
    """What has to be compiled for a block."""
    return make_job(block.module, block.inputs)


def _uses_outside(program: Program) -> dict[int, set[int]]:
    """For each block, the registers that other blocks, or Python, read."""
    out = {}
    for first, end in program.blocks:
        others = (*program.instructions[:first], *program.instructions[end:])
        out[first] = set(program.kept).union(*(reads(i) for i in others))
    return out


def _spliced(program: Program, replaced: dict[int, list[Instruction]]) -> Program:
    """The program with some blocks replaced, its jumps pointing where they did."""
    ends = dict(program.blocks)
    out: list[Instruction] = []
    starts: dict[int, int] = {}
    position = 0
    while position < len(program.instructions):
        starts[position] = len(out)
        if position in replaced:
            out += replaced[position]
            position = ends[position]
        else:
            out.append(replace(program.instructions[position], release=()))
            position += 1
    starts[position] = len(out)
    return replace(program, instructions=tuple(retargeted(i, starts) for i in out), blocks=())
