"""Executors: what runs the blocks of a program.

`aten` runs a program's instructions as they are, one ATen operation after the other. `inductor`
replaces every block by a compiled library; what it cannot compile runs by `aten`, with the reason.
`placed` hands stretches of operations to `placement`, which finds the fastest backend for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

from coexec.executors.background import Compilation
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.program import Program
from coexec.tracegraph.symbolic import SharedShadow, lower


@dataclass(frozen=True, slots=True)
class Made:
    """What runs a graph.

    Attributes:
        program: the program.
        why_aten: why it is `aten`'s although another executor was asked for.
        compilation: of blocks that are not on disk; until it is done, the program is `aten`'s.
    """

    program: Program
    why_aten: str | None = None
    compilation: Compilation | None = None


def make_program(graph: TraceGraph, executor: str, *, background: bool = False) -> Made:
    """The program of a graph for an executor.

    Args:
        graph: what to execute.
        executor: `aten`, `inductor` or `placed`.
        background: whether another process compiles the blocks that are not on disk, which happens here
            and now otherwise.

    Raises:
        SharedShadow: if memory that several external tensors share is written and looked at.
    """
    if executor == "aten":
        return Made(lower(graph))
    if executor == "placed":
        from coexec.executors.placed import place_blocks

        return Made(place_blocks(lower(graph)))
    from coexec.executors.inductor import divide, link, missing
    from coexec.executors.job import Unsupported

    try:
        divided = divide(graph)
        if background and (jobs := missing(divided)):
            return Made(lower(graph), compilation=Compilation(jobs))
        return Made(link(divided))
    except SharedShadow:
        return Made(lower(graph), "external tensors that share memory are written")
    except Unsupported as e:
        return Made(lower(graph), str(e))


def compile_in_background(graph: TraceGraph) -> Compilation | None:
    """Has another process compile the blocks of a graph; None if there is nothing that it could do."""
    from coexec.executors.inductor import divide, missing
    from coexec.executors.job import Unsupported

    try:
        jobs = missing(divide(graph))
    except (SharedShadow, Unsupported):
        return None  # `make_program` says so
    return Compilation(jobs) if jobs else None
