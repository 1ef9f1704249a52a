"""Memory that several registers of a program are on.

In:  a program; its instructions, in the units that are compiled.
Out: which registers are views of which, and whether libraries may be made of the units.

A library returns memory of its own, and takes it for granted that no two of its inputs share memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from coexec.tracegraph.instructions import reads, registers_in, writes
from coexec.tracegraph.program import Call, Fetch, Instruction, Move, Program, When
from coexec.tracer.operations import written_positions


def written_by(instruction: Instruction) -> list[int]:
    """The registers whose memory a call writes."""
    if not isinstance(instruction, Call):
        return []
    positions = written_positions(instruction.target, instruction.args)
    return [r for p in positions for r in registers_in(instruction.args[p])]


def views_in(program: Program) -> dict[int, set[int]]:
    """For each register that is, or may be, a view, what it is a view of in the end."""
    views: dict[int, set[int]] = defaultdict(set)

    def add(view: int, of: int) -> None:
        views[view] |= views.get(of, {of})

    for instruction in program.instructions:
        if isinstance(instruction, Move):
            for out, source in zip(instruction.outs, instruction.sources, strict=True):
                add(out, source)
        elif isinstance(instruction, Call):
            arguments = zip(instruction.target._schema.arguments, instruction.args, strict=True)
            viewed = [r for d, a in arguments if d.alias_info is not None for r in registers_in(a)]
            if any(returned.alias_info is not None for returned in instruction.target._schema.returns):
                for out in writes(instruction):
                    for register in viewed:
                        add(out, register)
    return dict(views)


def share_across(
    program: Program, views: Mapping[int, set[int]], units: Sequence[Sequence[Instruction]]
) -> bool:
    """Whether memory that is written goes by several registers from one unit to another, or to Python.

    What is put off to the commit does not count here: nothing that runs before sees what it writes.
    """
    unit_of = {r: number for number, unit in enumerate(units) for i in unit for r in writes(i)}
    made_at_the_end = {program.plans[node].outputs[output] for node, output in program.rebased}
    handed: set[int] = set(program.kept - made_at_the_end)
    for number, unit in enumerate(units):
        handed |= {r for i in unit for r in reads(i) if unit_of.get(r) != number}
    compiled = {id(i) for unit in units for i in unit}
    for instruction in program.instructions:
        if id(instruction) not in compiled:
            handed |= {r for r in reads(instruction) if r in unit_of}
    written = {
        memory
        for instruction in program.instructions
        if not (isinstance(instruction, Call) and instruction.when is not When.NOW)
        for register in written_by(instruction)
        for memory in views.get(register, {register})
    }
    on: Mapping[int, set[int]] = defaultdict(set)
    for register in handed:
        for memory in views.get(register, {register}) & written:
            on[memory].add(register)
    return any(len(registers) > 1 for registers in on.values())


def lost_draws(body: Sequence[Instruction], needed: set[int], views: Mapping[int, set[int]]) -> set[int]:
    """Registers of random numbers that nothing needs, which a compiler would not draw."""
    made = {r for i in body for r in writes(i)}

    def memory(registers: Iterable[int]) -> set[int]:
        return {m for r in registers for m in (r, *views.get(r, ()))}

    used = memory(needed)
    lost: set[int] = set()
    for instruction in reversed(body):
        changed = [*writes(instruction), *written_by(instruction)]
        draws = isinstance(instruction, Call) and instruction.random
        outside = any(m not in made for m in memory(written_by(instruction)))
        if isinstance(instruction, Fetch) or outside or memory(changed) & used:
            used |= memory(reads(instruction))
        elif draws:
            lost |= set(changed)
            used |= memory([*changed, *reads(instruction)])
    return lost
