"""The commit block of a compiled program: what it puts off until the iteration is valid.

In:  a program lowered for a compiler, with deferral.
Out: which instructions wait for the commit; whether they may be compiled apart from all others.

A library returns memory of its own, so a view that one library makes is no view of what another one writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from coexec.executors.aliases import views_in, written_by
from coexec.tracegraph.instructions import reads, writes
from coexec.tracegraph.program import Call, Feed, Instruction, Program, When


def is_late(instruction: Instruction) -> bool:
    """Whether an instruction is one that waits for the commit; what is copied back at its end is none."""
    return isinstance(instruction, (Call, Feed)) and instruction.when is When.COMMIT


def is_apart(program: Program) -> bool:
    """Whether libraries may be compiled of what is put off, and of what is not.

    What is put off may write external tensors themselves, what it has made, and what was made before. Nothing
    else that it reads, or that Python gets, may be on the same memory and come from another library.
    """
    external = {*program.captured.values(), *(i.out for i in program.instructions if isinstance(i, Feed))}
    views = views_in(program)
    made_in: dict[int, int] = {}  # the block of a late instruction that makes a register
    written: set[int] = set()  # memory, by the register that made it
    handed: set[int] = set()  # registers that one library gets from another, or from outside
    for block, instruction in _in_blocks(program):
        if is_late(instruction):
            handed |= {r for r in reads(instruction) if made_in.get(r) != block}
            written |= {m for r in written_by(instruction) for m in views.get(r, {r})}
            made_in.update(dict.fromkeys(writes(instruction), block))
    for memory in written:
        on_it = {r for r in handed | program.kept if memory in views.get(r, {r})}
        if memory in external:
            on_it &= handed  # what Python gets of it is made at the end
        if len(on_it) > 1 or (memory in external and not on_it <= {memory}):
            return False
    return True


def behind(program: Program, uncompiled: Collection[int], views: Mapping[int, set[int]]) -> set[int]:
    """The ids of calls put off that come after one which stays as it is; libraries come before these."""
    found: set[int] = set()
    made: set[int] = set()  # registers
    changed: set[int] = set()  # memory, by the register that made it
    looked_at: set[int] = set()
    for call in program.instructions:
        if not is_late(call) or not isinstance(call, Call):
            continue
        read = {m for r in reads(call) for m in views.get(r, {r})}
        written = {m for r in written_by(call) for m in views.get(r, {r})}
        depends = made.intersection(reads(call)) or read & changed or written & looked_at
        if id(call) in uncompiled or depends:
            found |= {id(call)} - set(uncompiled)
            made |= set(writes(call))
            changed |= written
            looked_at |= read
    return found


def _in_blocks(program: Program) -> Iterator[tuple[int, Instruction]]:
    for first, end in program.blocks:
        for instruction in program.instructions[first:end]:
            yield first, instruction
