"""Executors: what runs the blocks of a program.

`aten` runs a program's instructions as they are, one ATen operation after the other. `inductor`
replaces every block by a compiled library; what it cannot compile runs by `aten`, with the reason.
`placed` hands stretches of operations to `placement`, which finds the fastest backend for each part.
"""

from __future__ import annotations

from coexec.executors.background import Compilation
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.program import Program
from coexec.tracegraph.symbolic import SharedShadow, lower


def make_program(graph: TraceGraph, executor: str) -> tuple[Program, str | None]:
    """The program of a graph for an executor; blocks that are not on disk are compiled now.

    Args:
        graph: what to execute.
        executor: `aten`, `inductor` or `placed`.

    Returns:
        The program, and why it is `aten`'s although another executor was asked for.

    Raises:
        SharedShadow: if memory that several external tensors share is written and looked at.
    """
    if executor == "aten":
        return lower(graph), None
    if executor == "placed":
        from coexec.executors.placed import place_blocks

        return place_blocks(lower(graph)), None
    from coexec.executors.inductor import compile_blocks
    from coexec.executors.job import Unsupported

    try:
        return compile_blocks(graph), None
    except SharedShadow:
        return lower(graph), "external tensors that share memory are written"
    except Unsupported as e:
        return lower(graph), str(e)


def compile_in_background(graph: TraceGraph) -> Compilation | None:
    """Has another process compile the blocks of a graph; None if there is nothing that it could do."""
    from coexec.executors.inductor import jobs
    from coexec.executors.job import Unsupported

    try:
        missing = jobs(graph)
    except (SharedShadow, Unsupported):
        return None  # `make_program` says so
    return Compilation(missing) if missing else None
