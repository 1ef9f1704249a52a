"""Zero-bubble schedules: backward is split, and its weight part fills what would be bubbles.

In:  ranks and micro-batches.
Out: a `Program` with `BI` and `BW` in place of `B`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.actions import Compute, Kind
from pipeline.errors import ProgramError
from pipeline.program import Layout, Program, StageLayout, chain
from pipeline.schedules.synchronous import finish


def zb_h1(ranks: int, micro_batches: int) -> Program:
    """ZB-H1: 1F1B's order, with each weight part put off so long that no rank holds more than 1F1B's first.

    The bubble is (p-1)(F + BI - BW), a third of 1F1B's when the three take as long.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, section 2.1.
    """
    layout = chain(micro_batches, [1] * ranks)
    return Program(
        layout, tuple((*_h1_rank(r, ranks, micro_batches), *finish(layout, r)) for r in range(ranks))
    )


def _h1_rank(rank: int, ranks: int, micro_batches: int) -> Iterator[Compute]:
    ahead = min(ranks - rank, micro_batches)
    yield from (Compute(Kind.FORWARD, rank, k) for k in range(ahead))
    for k in range(micro_batches):
        yield Compute(Kind.BACKWARD_INPUT, rank, k)
        if k >= rank:
            yield Compute(Kind.BACKWARD_WEIGHT, rank, k - rank)
        if ahead + k < micro_batches:
            yield Compute(Kind.FORWARD, rank, ahead + k)
    yield from (
        Compute(Kind.BACKWARD_WEIGHT, rank, k) for k in range(max(micro_batches - rank, 0), micro_batches)
    )


def zbv(ranks: int, micro_batches: int) -> Program:
    """ZB-V: two chunks a rank, the second one on the way back, so that the first rank also has the loss.

    Stage `s < p` is on rank `s`, stage `s >= p` on rank `2p - 1 - s`. Each rank peaks at 2p chunks.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, section 6; the order is that of torch 2.13.

    Args:
        ranks: Ranks p.
        micro_batches: At least 2p - 1.
    """
    if micro_batches < 2 * ranks - 1:
        raise ProgramError(
            f"ZB-V on {ranks} ranks needs at least {2 * ranks - 1} micro-batches; got {micro_batches}."
        )
    places = [*range(ranks), *reversed(range(ranks))]
    layout = Layout(
        tuple(StageLayout(1, (r,), micro_batches) for r in places),
        tuple((s, s + 1) for s in range(2 * ranks - 1)),
        micro_batches,
    )
    return Program(
        layout, tuple((*_v_rank(r, ranks, micro_batches), *finish(layout, r)) for r in range(ranks))
    )


def _v_rank(rank: int, ranks: int, micro_batches: int) -> Iterator[Compute]:
    down, up = rank, 2 * ranks - 1 - rank
    done = dict.fromkeys([(kind, s) for kind in Kind for s in (down, up)], 0)

    def step(kind: Kind, stage: int) -> Iterator[Compute]:
        k = done[kind, stage]
        if k < micro_batches:
            done[kind, stage] += 1
            yield Compute(kind, stage, k)

    def backward(stage: int) -> Iterator[Compute]:
        yield from step(Kind.BACKWARD_INPUT, stage)
        yield from step(Kind.BACKWARD_WEIGHT, stage)

    for _ in range(2 * (ranks - rank) - 1):
        yield from step(Kind.FORWARD, down)
    for _ in range(rank):
        yield from step(Kind.FORWARD, up)
        yield from step(Kind.FORWARD, down)
    for _ in range(ranks - rank):
        yield from step(Kind.FORWARD, up)
        yield from backward(up)
    while done[Kind.FORWARD, up] < micro_batches:
        yield from step(Kind.FORWARD, down)
        yield from backward(down)
        yield from step(Kind.FORWARD, up)
        yield from backward(up)
    for _ in range(rank):
        yield from step(Kind.BACKWARD_INPUT, down)
        yield from step(Kind.BACKWARD_INPUT, up)
    while done[Kind.BACKWARD_INPUT, down] < micro_batches:
        yield from step(Kind.BACKWARD_INPUT, down)
        yield from step(Kind.BACKWARD_WEIGHT, down)
    for stage in (up, down):
        while done[Kind.BACKWARD_WEIGHT, stage] < micro_batches:
            yield from step(Kind.BACKWARD_WEIGHT, stage)
