"""Interleaved 1F1B: each rank holds several chunks of the model, which makes the bubble smaller.

In:  ranks, micro-batches and chunks.
Out: a `Program`; chunk `c` of rank `r` is stage `c * ranks + r`.
"""

from __future__ import annotations

from pipeline.actions import Compute, Kind
from pipeline.errors import ProgramError
from pipeline.program import Layout, Program, StageLayout
from pipeline.schedules.synchronous import finish


def interleaved(ranks: int, micro_batches: int, chunks: int, *, replicas: int = 1) -> Program:
    """Interleaved 1F1B.

    Args:
        ranks: Ranks p of one pipeline.
        micro_batches: Micro-batches of one pipeline in a batch; a multiple of `ranks`.
        chunks: Chunks v of the model on each rank.
        replicas: How many such pipelines share the batch, round-robin.

    Source: PTD-P, section 4.2.2.
    """
    layout = round_robin(ranks, micro_batches, chunks, replicas=replicas)
    if micro_batches % ranks:
        raise ProgramError(
            f"interleaved 1F1B needs a multiple of the {ranks} ranks as micro-batches; {micro_batches} isn't."
        )
    work = range(micro_batches * chunks)
    programs = []
    for rank in range(layout.ranks):
        r, replica = divmod(rank, replicas)
        forward = [_step(i, r, replica, Kind.FORWARD, ranks, chunks, replicas) for i in work]
        backward = [_step(i, r, replica, Kind.BACKWARD, ranks, chunks, replicas) for i in work]
        ahead = min(warm_up(ranks, r, chunks) + 1, len(work))
        order = forward[:ahead]
        for i, step in enumerate(backward):
            order.append(step)
            order += forward[ahead + i : ahead + i + 1]
        programs.append((*order, *finish(layout, rank)))
    return Program(layout, tuple(programs))


def warm_up(ranks: int, rank: int, chunks: int) -> int:
    """Forward passes of a rank before it takes backward and forward in turn: 2(p-r-1) + (v-1)p.

    It peaks at one more than that, when there are micro-batches enough.
    """
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks


def round_robin(ranks: int, micro_batches: int, chunks: int, *, replicas: int = 1) -> Layout:
    """The layout of chunks dealt out to ranks in turn; the ranks of a stage's replicas are consecutive."""
    if min(ranks, micro_batches, chunks, replicas) < 1:
        raise ProgramError("ranks, micro-batches, chunks and replicas must each be at least 1.")
    stages = tuple(
        StageLayout(1, tuple(range(r * replicas, (r + 1) * replicas)), micro_batches * replicas)
        for _ in range(chunks)
        for r in range(ranks)
    )
    edges = tuple((s, s + 1) for s in range(len(stages) - 1))
    return Layout(stages, edges, micro_batches * replicas)


def _step(i: int, r: int, replica: int, kind: Kind, ranks: int, chunks: int, replicas: int) -> Compute:
    """The i-th forward or backward of a rank: `ranks` micro-batches through a chunk, then the next chunk."""
    group, within = divmod(i, ranks * chunks)
    chunk, k = divmod(within, ranks)
    if kind is Kind.BACKWARD:
        chunk = chunks - 1 - chunk
    return Compute(kind, chunk * ranks + r, (group * ranks + k) * replicas + replica)
