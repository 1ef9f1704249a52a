"""Loops of the user's program, found in its bytecode.

In:  a code object and an instruction in it; a location.
Out: the loops around it, outermost first. An iteration number is not part of a location: two
     iterations of a loop are the same place.

Source: Terra, section 3.2.2 (loop ids of the executed location), by reading bytecode where Terra
rewrites the program.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop: the code object it is in, its first and last instruction, its source line."""

    code: CodeType
    first: int
    last: int
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_name}:{self.line}"


@functools.lru_cache(maxsize=4096)
def loops_of(code: CodeType) -> tuple[Loop, ...]:
    """The loops of a code object, outer before inner."""
    last: dict[int, int] = {}
    lines: dict[int, int] = {}
    line = code.co_firstlineno
    starts = {start: number for start, _, number in code.co_lines() if number is not None}
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        lines[instruction.offset] = line
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        if jumps and isinstance(instruction.argval, int) and instruction.argval <= instruction.offset:
            last[instruction.argval] = max(last.get(instruction.argval, 0), instruction.offset)
    found = [Loop(code, first, end, lines.get(first, code.co_firstlineno)) for first, end in last.items()]
    return tuple(sorted(found, key=lambda loop: (loop.first, -loop.last)))


def enclosing(code: CodeType, instruction: int) -> tuple[Loop, ...]:
    """The loops of a code object that an instruction is in, outermost first."""
    return tuple(loop for loop in loops_of(code) if loop.first <= instruction <= loop.last)


def loops_around(
    sites: Iterable[tuple[CodeType, int]], entry: tuple[CodeType, int] | None
) -> tuple[Loop, ...]:
    """The loops around a location, outermost first.

    Args:
        sites: the call sites of the location, outermost first.
        entry: where the tape was entered; loops around it are around every iteration and not in it.
    """
    around: list[Loop] = []
    for position, (code, instruction) in enumerate(sites):
        outside = enclosing(*entry) if entry is not None and position == 0 and code is entry[0] else ()
        around += [loop for loop in enclosing(code, instruction) if loop not in outside]
    return tuple(around)
