"""Moves what Python looks at to where it is there before Python asks.

A program may look at its loss when the optimizer's step is done, to log it. In program order Python would
wait for the backward pass, and the GraphRunner for Python. `behind_makers` puts each fetch, and tiny calls
that it needs, behind what makes their values.

An optimizer reads its step counters in every iteration. In program order the counters are advanced
after the backward pass, so Python would wait for all of it. What such a fetch needs is tiny and
depends on nothing but captured tensors; `early` finds what is to be run first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coexec.tracegraph.hazards import Access

#: Elements of the largest tensor that counts as tiny.
TINY = 64


@dataclass(frozen=True, slots=True)
class Movable:
    """What has to be known of an instruction: its accesses, and whether it may be moved at all.

    An instruction may be moved if it is executed on every path, not put off to the commit, draws no
    random numbers, and all its tensors are tiny. `fetch` marks those that are worth it.
    """

    access: Access
    allowed: bool
    fetch: bool


def behind_makers(
    accesses: Sequence[Access],
    fetches: Collection[int],
    movable: Collection[int],
    staying: Collection[int],
    stretches: Sequence[tuple[int, int]],
) -> list[int]:
    """Puts each fetch where its value can first be read, if what it needs comes early, too.

    Args:
        accesses: all instructions in program order.
        fetches: positions of fetches.
        movable: positions of instructions that write nothing and may be moved if a fetch needs them.
        staying: positions of instructions that nothing passes.
        stretches: first and last + 1 of stretches that are entered only at the first instruction.

    Returns:
        The positions in their new order.
    """
    order = list(range(len(accesses)))
    for first, end in stretches:
        moving: set[int] = set()
        needed: set[int] = set()
        for position in range(end - 1, first - 1, -1):
            access = accesses[position]
            if position in fetches or (position in movable and access.defines & needed):
                moving.add(position)
                needed |= access.uses
        behind: dict[int, int] = {}  # what each comes behind; itself where it stays
        defined: dict[int, int] = {}  # the last instruction that defines a register
        written: dict[int, int] = {}  # the last one that writes memory
        last_staying = first - 1
        for position in range(first, end):
            access = accesses[position]
            place = position
            if position in moving:
                makers = [defined[r] for r in access.uses if r in defined]
                makers += [written[m] for m in access.reads if m in written]
                place = max([last_staying, *makers])
            behind[position] = place
            defined.update(dict.fromkeys(access.defines, place))
            written.update(dict.fromkeys(access.writes, place))
            if position in staying:
                last_staying = position
        before: dict[int, int] = {}  # what a register has to be there behind
        for position in sorted(moving, reverse=True):
            access = accesses[position]
            needed_behind = min([before[r] for r in access.defines if r in before], default=end)
            if position not in fetches and position <= needed_behind:
                behind[position] = position  # it is there early enough
                continue
            for register in access.uses:
                before[register] = min(behind[position], before.get(register, end))
        order[first:end] = sorted(range(first, end), key=lambda position: (behind[position], position))
    return order


def early(instructions: Sequence[Movable], ready: frozenset[int]) -> list[int]:
    """The instructions to run first, in program order.

    Args:
        instructions: all instructions in program order.
        ready: registers that hold captured tensors.
    """
    candidates: set[int] = set()
    defined = set(ready)
    touched: set[int] = set()  # memory that instructions which stay read or write
    written: set[int] = set()
    for position, movable in enumerate(instructions):
        access = movable.access
        moves = (
            movable.allowed
            and access.uses <= defined
            and not access.writes & touched
            and not access.reads & written
        )
        if moves:
            candidates.add(position)
            defined |= access.defines
        else:
            touched |= access.reads | access.writes
            written |= access.writes
    return _needed(instructions, candidates)


def _needed(instructions: Sequence[Movable], candidates: set[int]) -> list[int]:
    """The candidates that a fetch among them depends on, and the fetches."""
    uses: set[int] = set()
    memory: set[int] = set()
    chosen = []
    for position in sorted(candidates, reverse=True):
        access = instructions[position].access
        if instructions[position].fetch or access.defines & uses or access.writes & memory:
            chosen.append(position)
            uses |= access.uses
            memory |= access.reads | access.writes
    return _closed(instructions, chosen[::-1], candidates)


def _closed(instructions: Sequence[Movable], chosen: list[int], candidates: set[int]) -> list[int]:
    """Leaves out what would pass a candidate that stays and touches the same memory."""
    going = set(chosen)
    result = []
    read: set[int] = set()  # by candidates that stay
    written: set[int] = set()
    defined: set[int] = set()
    for position in sorted(candidates):
        access = instructions[position].access
        passes = not (access.writes & (read | written) or access.reads & written or access.uses & defined)
        if position in going and passes:
            result.append(position)
        else:
            read |= access.reads
            written |= access.writes
            defined |= access.defines
    return result
