"""What blocks have to know of the registers of the whole program.

In:  a program.
Out: `Registers`, found out once for all of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coexec.executors.aliases import views_in
from coexec.tracegraph.numbers import is_number
from coexec.tracegraph.program import Feed, Program, Reg
from coexec.tracegraph.trace import Number


@dataclass(frozen=True, slots=True)
class Registers:
    """The registers of a program.

    Attributes:
        program: the program, whose `metas` are those of tensors.
        views: what each view is, or may be, a view of.
        numbers: an example of each number that varies.
    """

    program: Program
    views: Mapping[int, set[int]]
    numbers: Mapping[int, Number]

    def holds_number(self, argument: Any) -> bool:
        """Whether an argument is a number that varies, or a list with one."""
        if isinstance(argument, tuple):
            return any(map(self.holds_number, argument))
        return isinstance(argument, Reg) and argument.index in self.numbers


def registers_of(program: Program) -> Registers:
    """What is known of the registers of a program."""
    feeds = [i for i in program.instructions if isinstance(i, Feed)]
    return Registers(program, views_in(program), {f.out: f.example for f in feeds if is_number(f.example)})
