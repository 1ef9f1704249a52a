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


def written_now(instructions: Iterable[Instruction], views: Mapping[int, set[int]]) -> set[int]:
    """The memory that is written before the commit, by the registers that have it first."""
    return {
        memory
        for instruction in instructions
        if not (isinstance(instruction, Call) and instruction.when is not When.NOW)
        for register in written_by(instruction)
        for memory in views.get(register, {register})
    }


def views_on(program: Program, views: Mapping[int, set[int]], memory: set[int]) -> dict[int, Call]:
    """The calls that make views of some memory, by the registers of the views.

    A library that returns such a view would return a copy; so each may make the views that it uses.
    """
    return {
        instruction.outs[0]: instruction
        for instruction in program.instructions
        if isinstance(instruction, Call)
        and len(instruction.outs) == 1
        and instruction.outs[0] is not None
        and instruction.when is When.NOW
        and not instruction.target._schema.is_mutable
        and any(returned.alias_info is not None for returned in instruction.target._schema.returns)
        and not memory.isdisjoint(views.get(instruction.outs[0], ()))
    }


def with_own_views(unit: Sequence[Instruction], made: Mapping[int, Call]) -> list[Instruction]:
    """A unit that makes these views itself if it uses them."""
    inside = {r for i in unit for r in writes(i)}
    own: dict[int, Call] = {}

    def make(register: int) -> None:
        if register in made and register not in inside and register not in own:
            for argument in reads(made[register]):
                make(argument)
            own[register] = made[register]

    for instruction in unit:
        for register in reads(instruction):
            make(register)
    return [*own.values(), *unit]


def read_from_outside(unit: Sequence[Instruction]) -> set[int]:
    """The registers that a unit reads and does not make."""
    made: set[int] = set()
    outside: set[int] = set()
    for instruction in unit:
        outside |= {r for r in reads(instruction) if r not in made}
        made |= set(writes(instruction))
    return outside


def shared_across(
    program: Program, views: Mapping[int, set[int]], units: Sequence[Sequence[Instruction]]
) -> set[int]:
    """Memory that is written and goes by several registers from one unit to another, or to Python.

    A register that another was moved to, between the units, has the very same tensor; what a unit then must
    not do is to write one and read the other. What is put off to the commit does not count here: nothing that
    runs before sees what it writes.
    """
    made = {r for unit in units for i in unit for r in writes(i)}
    compiled = {id(i) for unit in units for i in unit}
    outside = [i for i in program.instructions if id(i) not in compiled]
    moved: dict[int, set[int]] = {}
    for instruction in outside:
        if isinstance(instruction, Move):
            for out, source in zip(instruction.outs, instruction.sources, strict=True):
                moved.setdefault(out, {out}).update(moved.get(source, {source}))
    made_at_the_end = {program.plans[node].outputs[output] for node, output in program.rebased}
    inputs = [read_from_outside(unit) for unit in units]
    handed = set(program.kept - made_at_the_end).union(*inputs)
    handed |= {r for i in outside for r in reads(i) if r in made}
    on: Mapping[int, set[int]] = defaultdict(set)
    written = written_now(program.instructions, views)
    for register in handed:
        for memory in views.get(register, {register}) & written:
            on[memory].add(register)
    several = {memory: registers for memory, registers in on.items() if len(registers) > 1}
    shared = {m for m, registers in several.items() if any(m not in moved.get(r, {r}) for r in registers)}
    for unit, read in zip(units, inputs, strict=True):
        at_once = {m for m, registers in several.items() if len(registers & read) > 1}
        shared |= at_once & written_now(unit, views) if at_once else set()
    return shared


def used_by(units: Iterable[Sequence[Instruction]], views: Mapping[int, set[int]]) -> set[int]:
    """The memory that some units use."""
    return {m for unit in units for i in unit for r in (*reads(i), *writes(i)) for m in views.get(r, {r})}


def using(program: Program, views: Mapping[int, set[int]], memory: set[int]) -> set[int]:
    """The ids of the calls and moves that use some memory.

    At the commit, libraries run first. What is done then to memory that such a call has made or written is
    left to calls, too.
    """
    found: set[int] = set()
    memory = set(memory)
    while True:
        fresh = [
            i
            for i in program.instructions
            if isinstance(i, (Call, Move)) and id(i) not in found and memory & used_by([[i]], views)
        ]
        if not fresh:
            return found
        found |= {id(i) for i in fresh}
        late = (i for i in fresh if isinstance(i, Call) and i.when is When.COMMIT)
        memory |= {m for i in late for r in (*written_by(i), *writes(i)) for m in views.get(r, {r})}


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
