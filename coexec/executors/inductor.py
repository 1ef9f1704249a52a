"""The inductor executor: every basic block is one library, compiled ahead of time by TorchInductor.

In:  a TraceGraph, lowered for a compiler.
Out: the program with each block's instructions replaced by one `Compiled`, and another one for what the block
     puts off to the commit, which writes external tensors in place. Or the blocks that are not compiled yet.

Inside of a block, feeds and fetches are operators. A token passed from each to the next keeps them in
program order, which is what makes the two runners free of deadlock (Terra, figure 3.4).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from coexec._native import core
from coexec.executors.aliases import share_across
from coexec.executors.blocks import Block, job_of, make_block
from coexec.executors.commit_block import is_apart, is_late
from coexec.executors.job import Job, Unsupported, compiled, kernel_threads
from coexec.executors.registers import Registers, registers_of
from coexec.executors.sizes import before_late_symbols
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.instructions import at_commit, reads, spliced
from coexec.tracegraph.program import Call, Compiled, CompiledBlock, Feed, Fetch, Instruction, Program, When
from coexec.tracegraph.sizes import varies
from coexec.tracegraph.symbolic import SharedShadow, lower

log = logging.getLogger(__name__)

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
    ends = dict(program.blocks)
    linked = {first: (ends[first], [_linked(part) for part in made]) for first, made in parts.items()}
    made = tuple(block for part in parts.values() for block in _described(part))
    instructions = [replace(i, release=()) for i in spliced(program.instructions, linked)]
    return replace(
        program,
        instructions=tuple(instructions),
        blocks=(),
        compiled=made,
        uncompiled=program.instructions,
        threads=kernel_threads(),
    )


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
    registers = registers_of(program)
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
                made += stretch
                continue
            later = {r for s in stretches[position + 1 :] for i in s for r in reads(i)}
            made.append(make_block(registers, stretch, outside[first] | later | at_the_end))
            units.append(stretch)
        # Numbers first: libraries wait for nothing at the commit.
        made += (i for i in late if isinstance(i, Feed))
        calls = [i for i in late if isinstance(i, Call)]
        if calls:
            needed = outside[first].union(*(reads(i) for i in last))
            made += _commit_block(registers, calls, needed)
        parts[first] = [*made, *last]
        units.append(list(calls))
    if share_across(registers.program, registers.views, units):
        raise Unsupported("memory that is written is known by several names outside of a block")
    return parts


def _commit_block(registers: Registers, calls: list[Call], needed: set[int]) -> list[Part]:
    """What is put off as a block, or as it is where it cannot be compiled."""
    try:
        return [make_block(registers, calls, needed, When.COMMIT)]
    except Unsupported as error:
        log.info("%d operations at the commit run by aten: %s", len(calls), error)
        return list(calls)


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


def library_of(block: Block) -> Any:
    """A block's library, compiled now if it is not on disk."""
    return core.Library(str(compiled(job_of(block))))


def _linked(part: Part) -> Instruction:
    if not isinstance(part, Block):
        return part
    library = library_of(part)
    shapes = tuple(m.shape if m is not None and varies(m.shape) else None for m in part.metas)
    return Compiled(
        library,
        part.sources,
        part.outs,
        random=part.random,
        symbols=part.symbols,
        shapes=shapes,
        dtypes=tuple(None if m is None else m.dtype for m in part.metas),
        strides=tuple(None if m is None or varies(m.stride) else m.stride for m in part.metas),
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


def _uses_outside(program: Program) -> dict[int, set[int]]:
    """For each block, the registers that other blocks, or Python, read."""
    out = {}
    for first, end in program.blocks:
        others = (*program.instructions[:first], *program.instructions[end:])
        out[first] = set(program.kept).union(*(reads(i) for i in others))
    return out
