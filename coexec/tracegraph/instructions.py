"""What instructions read and write, and how lists of them are rewritten.

In:  instructions of a program under construction.
Out: other instructions; nothing here knows the TraceGraph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from coexec.tracegraph.program import (
    Call,
    Compiled,
    Feed,
    Fetch,
    Instruction,
    Jump,
    Move,
    Reg,
    Switch,
    When,
)
from coexec.tracegraph.trace import with_leaves


def at_commit(instruction: Instruction) -> bool:
    """Whether a call is put off until the iteration is valid."""
    return isinstance(instruction, (Call, Compiled)) and instruction.when is not When.NOW


def registers_in(argument: Any) -> list[int]:
    """The registers among the arguments of a call, in order."""
    if isinstance(argument, Reg):
        return [argument.index]
    if isinstance(argument, tuple):
        return [r for a in argument for r in registers_in(a)]
    return []


def reads(instruction: Instruction) -> list[int]:
    """The registers that an instruction reads."""
    match instruction:
        case Call():
            return registers_in(instruction.args)
        case Fetch():
            return [instruction.source]
        case Move() | Compiled():
            return list(instruction.sources)
    return []


def writes(instruction: Instruction) -> list[int]:
    """The registers that an instruction sets."""
    match instruction:
        case Call() | Move() | Compiled():
            return [o for o in instruction.outs if o is not None]
        case Feed():
            return [instruction.out]
    return []


def renamed(instruction: Instruction, names: dict[int, int]) -> Instruction:
    """The instruction reading other registers."""

    def rename(argument: Any) -> Any:
        return Reg(names.get(argument.index, argument.index)) if isinstance(argument, Reg) else argument

    match instruction:
        case Call():
            return replace(instruction, args=with_leaves(instruction.args, rename))
        case Fetch():
            return replace(instruction, source=names.get(instruction.source, instruction.source))
        case Move():
            return replace(instruction, sources=tuple(names.get(s, s) for s in instruction.sources))
    return instruction


def retargeted(instruction: Instruction, starts: Sequence[int] | dict[int, int]) -> Instruction:
    """The instruction jumping to where its targets have moved: from `i` to `starts[i]`."""
    match instruction:
        case Jump():
            return replace(instruction, target=starts[instruction.target])
        case Switch():
            return replace(instruction, targets=tuple(starts[t] for t in instruction.targets))
    return instruction


def shifted(instruction: Instruction, offset: int) -> Instruction:
    """The instruction with its targets moved by `offset`."""
    match instruction:
        case Jump():
            return replace(instruction, target=instruction.target + offset)
        case Switch():
            return replace(instruction, targets=tuple(t + offset for t in instruction.targets))
    return instruction


def spliced(
    instructions: Sequence[Instruction], replaced: Mapping[int, tuple[int, Sequence[Instruction]]]
) -> list[Instruction]:
    """Instructions with stretches, from a first to before an end, replaced; jumps point where they did."""
    out: list[Instruction] = []
    starts: dict[int, int] = {}
    position = 0
    while position < len(instructions):
        starts[position] = len(out)
        end, stretch = replaced.get(position, (position + 1, (instructions[position],)))
        out += stretch
        position = end
    starts[position] = len(out)
    return [retargeted(i, starts) for i in out]


def with_releases(instructions: Sequence[Instruction], kept: frozenset[int]) -> tuple[Instruction, ...]:
    """Drops every register after the last instruction that may read it, unless it is kept."""
    last: dict[int, int] = {}
    end = len(instructions) - 1
    for position, instruction in enumerate(instructions):
        for register in reads(instruction):
            last[register] = end if at_commit(instruction) else max(position, last.get(register, 0))
        for register in writes(instruction):
            last.setdefault(register, position)
    release: dict[int, list[int]] = {}
    for register, position in last.items():
        if register not in kept and position < end:
            release.setdefault(position, []).append(register)
    return tuple(replace(i, release=tuple(release.get(p, ()))) for p, i in enumerate(instructions))


def straight_stretches(instructions: Sequence[Instruction]) -> tuple[tuple[int, int], ...]:
    """Stretches (first, last + 1) entered only at the first instruction; the last one, the commit, apart."""
    leaders = {0, len(instructions) - 1, len(instructions)}
    for position, instruction in enumerate(instructions):
        match instruction:
            case Jump():
                leaders |= {position, position + 1, instruction.target}
            case Switch():
                leaders |= {position, position + 1, *instruction.targets}
    return tuple(
        (first, end)
        for first, end in pairwise(sorted(leaders))
        if not isinstance(instructions[first], (Jump, Switch))
    )
