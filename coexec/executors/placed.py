"""The placed executor: stretches of operations run where `placement` found them to be fastest.

In:  a program lowered with deferral, as for `aten`.
Out: the program with stretches of pure operations replaced by one call each, of a custom operator
     whose implementation is the placed graph.

A part that a backend computes is new memory, even where ATen would return a view. That is invisible
unless somebody writes to that memory, so operations on memory that the program writes stay as they are.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node

from coexec.tracegraph.instructions import at_commit, reads, spliced, with_releases, writes
from coexec.tracegraph.program import Call, CompiledBlock, Instruction, Program, Reg, When
from coexec.tracegraph.schema import by_schema
from coexec.tracegraph.sizes import fixed, varies
from coexec.tracegraph.trace import with_leaves
from placement.capture import without_values
from placement.graph import TensorSpec

log = logging.getLogger(__name__)

settings: dict[str, Any] = {"budget_s": 120.0, "level": "op"}
"""Options of `placement.optimize` for each stretch."""
SHORTEST = 2
"""Operations in a stretch that is worth placing."""

_library = torch.library.Library("coexec_placed", "DEF")
_numbers = itertools.count()


def place_blocks(program: Program) -> Program:
    """Replaces each stretch of pure operations by a placed one."""
    if program.asks:
        return program  # backends are measured on sizes, and values decide about some
    written = _written(program)
    replaced: dict[int, tuple[int, list[Instruction]]] = {}
    sizes = []
    for first, end in _stretches(program, written):
        body = [i for i in program.instructions[first:end] if isinstance(i, Call)]
        module, sources, outs = _graph(program, body, _needed(program, first, end))
        replaced[first] = (end, [_call(_placed(module), sources, outs)])
        sizes.append(CompiledBlock(len(body), 0, "placed"))
    if not replaced:
        return program
    released = with_releases(spliced(program.instructions, replaced), program.kept)
    return replace(program, instructions=released, blocks=(), compiled=tuple(sizes))


def _written(program: Program) -> set[int]:
    """The registers whose memory some operation writes, views of it included."""
    memory: nx.Graph[int] = nx.Graph()
    targets: set[int] = set()
    for instruction in program.instructions:
        if not isinstance(instruction, Call):
            sources, outs = reads(instruction), writes(instruction)
            memory.add_edges_from((s, o) for s in sources for o in outs)
            continue
        schema = instruction.target._schema
        shared = [o for o in instruction.outs if o is not None]
        for declared, argument in zip(schema.arguments, instruction.args, strict=True):
            if declared.alias_info is None:
                continue
            registers = reads(replace(instruction, args=(argument,)))
            if declared.alias_info.is_write:
                targets.update(registers)
            memory.add_edges_from((r, o) for r in registers for o in shared)
    found = set(targets)
    for register in targets & set(memory):
        found |= nx.node_connected_component(memory, register)
    return found


def _stretches(program: Program, written: set[int]) -> list[tuple[int, int]]:
    out = []
    for first, end in program.blocks:
        start = first
        for position in range(first, end + 1):
            fits = position < end and _is_pure(program, program.instructions[position], written)
            if not fits:
                if position - start >= SHORTEST:
                    out.append((start, position))
                start = position + 1
    return out


def _is_pure(program: Program, instruction: Instruction, written: set[int]) -> bool:
    if not isinstance(instruction, Call) or at_commit(instruction) or instruction.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in instruction.target.tags or instruction.grad_mode:
        return False
    touched = {*reads(instruction), *writes(instruction)}
    if not touched.isdisjoint(written) or any(r not in program.metas for r in touched):
        return False
    if varies(instruction.args) or any(varies(program.metas[r].shape) for r in touched):
        return False  # backends are measured on sizes
    return bool(touched) and not _has_generator(instruction.args)


def _has_generator(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(map(_has_generator, argument))
    return isinstance(argument, (torch.Generator, torch.Tensor))


def _needed(program: Program, first: int, end: int) -> set[int]:
    """The registers that anything outside of a stretch reads."""
    needed = set(program.kept)
    for position, instruction in enumerate(program.instructions):
        if not first <= position < end:
            needed |= set(reads(instruction))
    return needed


def _graph(
    program: Program, body: Sequence[Call], needed: set[int]
) -> tuple[GraphModule, tuple[int, ...], tuple[int, ...]]:
    """The FX graph of a stretch, the registers that it reads and those that it sets."""
    graph = Graph()
    env: dict[int, Node] = {}
    inside = {r for i in body for r in writes(i)}
    sources = tuple(r for r in dict.fromkeys(r for i in body for r in reads(i)) if r not in inside)

    def value(register: int) -> torch.Tensor:
        meta = program.metas[register]
        return without_values(TensorSpec(fixed(meta.shape), fixed(meta.stride), meta.dtype, str(meta.device)))

    for register in sources:
        env[register] = graph.placeholder(f"r{register}")
        env[register].meta["val"] = value(register)
    for call in body:
        _emit(graph, call, env, value)
    outs = tuple(r for r in env if r in needed and r in inside)
    graph.output(tuple(env[r] for r in outs))
    return GraphModule({}, graph), sources, outs


def _emit(graph: Graph, call: Call, env: dict[int, Node], value: Callable[[int], torch.Tensor]) -> None:
    def encode(argument: Any) -> Any:
        return env[argument.index] if isinstance(argument, Reg) else argument

    positional, keywords = by_schema(call.target, [with_leaves(a, encode, list) for a in call.args])
    node = graph.call_function(call.target, tuple(positional), keywords)
    values = [None if o is None else value(o) for o in call.outs]
    returns = call.target._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        node.meta["val"] = values[0]
        if call.outs[0] is not None:
            env[call.outs[0]] = node
        return
    node.meta["val"] = tuple(values)
    for index, out in enumerate(call.outs):
        if out is not None:
            env[out] = graph.call_function(operator.getitem, (node, index))
            env[out].meta["val"] = values[index]


def _placed(module: GraphModule) -> torch._ops.OpOverload:
    """A custom operator that runs a placed graph."""
    from placement.dynamo import place_graph

    log.info("placing a stretch of %d operations", len(module.graph.nodes))
    function = place_graph(module, **settings)
    name = f"stretch{next(_numbers)}"
    _library.define(f"{name}(Tensor[] inputs) -> Tensor[]")

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(function(*inputs))

    _library.impl(name, run, "CompositeExplicitAutograd")
    operation: torch._ops.OpOverload = getattr(torch.ops.coexec_placed, name).default
    return operation


def _call(target: torch._ops.OpOverload, sources: tuple[int, ...], outs: tuple[int, ...]) -> Call:
    return Call(target, (tuple(map(Reg, sources)),), outs, When.NOW, 0, shapes=(None,) * len(outs))
