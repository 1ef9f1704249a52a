"""The inductor executor: every basic block is one library, compiled ahead of time by TorchInductor.

In:  a TraceGraph, lowered for a compiler.
Out: the program with each block's instructions replaced by one `Compiled`, and another one for what the block
     puts off to the commit, which writes external tensors in place. Or the blocks that are not compiled yet.

Inside of a block, feeds and fetches are operators. A token passed from each to the next keeps them in
program order, which is what makes the two runners free of deadlock (Terra, figure 3.4).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coexec._native import core
from coexec.executors.aliases import (
    read_from_outside,
    shared_across,
    used_by,
    using,
    views_on,
    with_own_views,
)
from coexec.executors.blocks import Block, is_compiled, job_of, make_block
from coexec.executors.commit_block import behind, is_apart, is_late
from coexec.executors.job import Job, Unsupported, compiled, kernel_parts, kernel_threads
from coexec.executors.registers import Registers, registers_of
from coexec.executors.sizes import before_late_symbols
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.instructions import at_commit, reads, spliced, writes
from coexec.tracegraph.program import (
    Call,
    Compiled,
    CompiledBlock,
    Feed,
    Fetch,
    Instruction,
    Move,
    Program,
    When,
)
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


@dataclass(frozen=True, slots=True)
class Divided:
    """A program for a compiler, and by its first instruction what each block of it becomes."""

    program: Program
    parts: Mapping[int, list[Part]]


def divide(graph: TraceGraph) -> Divided:
    """The blocks of a graph, none of which is compiled yet.

    Raises:
        SharedShadow: if external tensors that share memory are written.
        Unsupported: if the native GraphRunner is missing, or a block cannot be compiled.
    """
    if core is None:
        raise Unsupported("compiled blocks need the native GraphRunner, which was not built")
    program = lowered(graph)
    return Divided(program, _parts(program))


def missing(divided: Divided) -> list[Job]:
    """The blocks that are not on disk.

    Raises:
        Unsupported: if a block cannot be compiled.
    """
    parts = itertools.chain.from_iterable(divided.parts.values())
    found = [job_of(part) for part in parts if isinstance(part, Block)]
    return [job for job in found if not job.path.exists()]


def link(divided: Divided) -> Program:
    """The program with its blocks compiled; those that are not on disk are compiled now.

    Raises:
        Unsupported: if a block cannot be compiled.
    """
    program, parts = divided.program, divided.parts
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
        parts=kernel_parts(),
    )


def _parts(program: Program) -> dict[int, list[Part]]:
    """By its first instruction, what each block of the program becomes."""
    if program.asks:
        raise Unsupported("a library is compiled for sizes, and values decide about some")
    registers = registers_of(program)
    if any(_lies_where_a_number_says(program.plans[n].outputs[o], registers) for n, o in program.rebased):
        raise Unsupported("a result views an external tensor at a place that varies")
    blocks = _blocks_apart(program, registers)
    units = [unit for pieces in blocks.values() for unit in pieces.units]
    in_units = {id(i) for unit in units for i in unit}
    rest = [i for i in program.instructions if id(i) not in in_units]
    needed = set(program.kept).union(*map(read_from_outside, units), *map(reads, rest))
    return {first: _compiled_pieces(pieces, registers, needed) for first, pieces in blocks.items()}


def _blocks_apart(program: Program, registers: Registers) -> dict[int, _Pieces]:
    """The blocks of a program, so that no library writes memory which others know by another name.

    A library makes the views that it uses itself, or what is done to such memory is left uncompiled.
    """
    views = registers.views
    never = {id(i) for i in program.instructions if not is_compiled(i, registers)}
    own: dict[int, Call] | None = None
    apart = _told_by_memory(program, views)
    while True:
        as_it_is = never | using(program, views, apart)
        uncompiled = _with_feeds(program, as_it_is | behind(program, as_it_is, views))
        blocks = {
            first: _pieces(program.instructions[first:end], program, uncompiled).with_own_views(own or {})
            for first, end in program.blocks
        }
        units = [unit for pieces in blocks.values() for unit in pieces.units]
        shared = shared_across(program, views, units) & used_by(units, views)
        if not shared:
            return blocks
        if own is None:
            own = {r: v for r, v in views_on(program, views, shared).items() if is_compiled(v, registers)}
        elif shared <= apart:
            raise Unsupported("memory that is written is known by several names outside of a block")
        else:
            apart |= shared


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A block in the order in which it runs: stretches, compiled or not, and what is put off to the commit.

    `late` is compiled, `last` is put off as it is.
    """

    stretches: tuple[tuple[bool, list[Instruction]], ...]
    late_feeds: list[Feed]
    late: list[Call]
    last: list[Instruction]

    @property
    def units(self) -> list[Sequence[Instruction]]:
        """What becomes a library each."""
        return [*(stretch for compiles, stretch in self.stretches if compiles), self.late]

    def with_own_views(self, made: Mapping[int, Call]) -> _Pieces:
        """The same with libraries that make these views themselves."""
        stretches = tuple((c, with_own_views(s, made) if c else s) for c, s in self.stretches)
        return replace(self, stretches=stretches)


def _told_by_memory(program: Program, views: Mapping[int, set[int]]) -> set[int]:
    """The memory of results that view an external tensor on some paths only; which, their memory tells."""
    registers = [
        r
        for (node, output), rebase in program.rebased.items()
        if rebase.shadow is not None
        for r in (program.plans[node].outputs[output], rebase.shadow)
    ]
    return {m for r in registers for m in views.get(r, {r})}


def _with_feeds(program: Program, uncompiled: set[int]) -> set[int]:
    """The ids of the instructions that stay as they are, with those that feed them."""
    instructions = program.instructions
    calls = [i for i in instructions if id(i) in uncompiled]
    # A library is fed a copy, a tensor: no use for what the commit writes, and for the numbers of calls.
    unfed = {r for i in instructions if at_commit(i) for r in reads(i)}.union(*map(reads, calls))
    return uncompiled | {id(i) for i in instructions if isinstance(i, Feed) and i.out in unfed}


def _pieces(block: Sequence[Instruction], program: Program, uncompiled: set[int]) -> _Pieces:
    late = [i for i in block if is_late(i) and (isinstance(i, Feed) or id(i) not in uncompiled)]
    put_off = {id(i) for i in late}
    stretches: list[tuple[bool, list[Instruction]]] = []
    now = (i for i in block if not at_commit(i) and not is_late(i))
    for can_be, group in itertools.groupby(now, lambda i: id(i) not in uncompiled):
        body = list(group)
        parts = before_late_symbols(body, program) if can_be else [body]
        stretches += [(can_be and any(isinstance(i, (Call, Feed, Fetch)) for i in p), p) for p in parts]
    return _Pieces(
        tuple(stretches),
        [i for i in late if isinstance(i, Feed)],
        [i for i in late if isinstance(i, Call)],
        [i for i in block if at_commit(i) and id(i) not in put_off],
    )


def _lies_where_a_number_says(view: int, registers: Registers) -> bool:
    """Whether a number that varies decides which part of its memory a view is."""
    makers = {o: i for i in registers.program.instructions if isinstance(i, (Call, Move)) for o in writes(i)}
    reached = [view]
    for register in reached:
        maker = makers.get(register)
        if isinstance(maker, Call) and registers.holds_number(maker.args):
            return True
        memory = registers.views.get(register, {register})
        for read in reads(maker) if maker is not None else ():
            if read not in reached and not memory.isdisjoint(registers.views.get(read, {read})):
                reached.append(read)
    return False


def _compiled_pieces(pieces: _Pieces, registers: Registers, needed: set[int]) -> list[Part]:
    made: list[Part] = []
    for compiles, stretch in pieces.stretches:
        made += [make_block(registers, stretch, needed)] if compiles else stretch
    made += pieces.late_feeds  # first: libraries wait for nothing at the commit
    if pieces.late:
        made += _commit_block(registers, pieces.late, needed)
    return [*made, *pieces.last]


def _commit_block(registers: Registers, calls: list[Call], needed: set[int]) -> list[Part]:
    """What is put off as a block, or as it is where it cannot be compiled."""
    try:
        return [make_block(registers, calls, needed, When.COMMIT)]
    except Unsupported as error:
        log.info("%d operations at the commit run by aten: %s", len(calls), error)
        return list(calls)


def _described(parts: list[Part]) -> Iterator[CompiledBlock]:
    for part in parts:
        if isinstance(part, Block):
            late = part.operations if part.when is When.COMMIT else 0
            yield CompiledBlock(part.operations, late, "inductor")
    left = [p for p in parts if isinstance(p, Call) and (is_late(p) or not at_commit(p))]
    if left:
        yield CompiledBlock(len(left), sum(map(is_late, left)), "aten")


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
        given=part.given,
    )
