"""Which operations may run before the iteration is validated, and on what memory.

In:  the operations of a program in order, with the memory each reads and writes.
Out: for each, whether it waits for the commit; and which external memory needs a shadow.

An operation that writes external memory has to wait for the commit, and so does everything that
depends on it. That is impossible where Python looks at a result first (the fetch would wait for the
commit, the commit for Python): such memory is copied when it is bound, and the copy, its *shadow*, is
written at once. The same is done where an operation writes external memory beside computing a
result (batch norm and its running statistics), lest everything after it waits too.

This file knows nothing of tensors: memory is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """One operation: the memory that it reads and writes, the registers that it uses and defines.

    An `immediate` one (a fetch, or what may fail on some values) cannot be put off.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    uses: frozenset[int]
    defines: frozenset[int]
    immediate: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """The result: `deferred` for each access, and the external memory that needs a shadow."""

    deferred: tuple[bool, ...]
    shadowed: frozenset[int]


def schedule(accesses: Sequence[Access], external: frozenset[int], *, defer: bool = True) -> Schedule:
    """Defers as much as is needed and shadows as little as possible.

    Args:
        accesses: the operations in program order.
        external: memory from outside of the iteration.
        defer: whether operations may be put off at all; otherwise everything that is written is shadowed.
    """
    needed = [not defer or a.immediate or bool(a.defines and a.writes & external) for a in accesses]
    while True:
        _close(accesses, needed)
        shadowed = frozenset(
            m for a, n in zip(accesses, needed, strict=True) if n for m in a.writes if m in external
        )
        deferred = _defer(accesses, external - shadowed)
        stuck = [i for i, d in enumerate(deferred) if d and needed[i]]
        if not stuck:
            return Schedule(tuple(deferred), shadowed)
        for i in stuck:
            for j in range(i):
                if deferred[j] and _conflict(accesses[j], accesses[i]):
                    needed[j] = True


def _close(accesses: Sequence[Access], needed: list[bool]) -> None:
    """Marks everything that marked accesses read from."""
    uses: set[int] = set()
    touches: set[int] = set()
    for i in range(len(accesses) - 1, -1, -1):
        access = accesses[i]
        if needed[i] or access.defines & uses or access.writes & touches:
            needed[i] = True
            uses |= access.uses
            touches |= access.reads | access.writes


def _defer(accesses: Sequence[Access], committed: frozenset[int]) -> list[bool]:
    deferred = []
    defines: set[int] = set()
    reads: set[int] = set()
    writes: set[int] = set()
    for access in accesses:
        defer = bool(
            access.writes & committed
            or access.uses & defines
            or access.writes & (reads | writes)
            or access.reads & writes
        )
        deferred.append(defer)
        if defer:
            defines |= access.defines
            reads |= access.reads
            writes |= access.writes
    return deferred


def _conflict(first: Access, second: Access) -> bool:
    return bool(
        second.uses & first.defines
        or second.writes & (first.reads | first.writes)
        or second.reads & first.writes
    )
