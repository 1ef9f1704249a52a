"""Schedules that never flush: PipeDream's 1F1B with stashed weights, and 2BW's double buffer.

In:  a `Layout` whose samples are a window of training: the pipeline fills once, and drains at the end.
Out: a `Program` with updates, the weight version of every pass, and `STASH` wherever a version that is about
     to be overwritten is still to be used.

A version is named by the number of updates that made it. A stage with R replicas makes one update for each
round of R micro-batches, one from each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pipeline.actions import Action, Compute, Kind, Weights
from pipeline.errors import ProgramError
from pipeline.program import Layout, Program, with_updates
from pipeline.schedules.synchronous import alternate, in_flight, only_stage

Version = Callable[[int, int, int], int]
"""Weight version of a pass, from its stage, its micro-batch and the updates that its rank has made."""


def pipedream(layout: Layout, *, vertical_sync: bool = False) -> Program:
    """PipeDream: 1F1B with replicas round-robin, an update after every round, weights stashed.

    Args:
        layout: One stage a rank, one micro-batch size.
        vertical_sync: Every stage uses the version that the input stage had when the micro-batch entered,
            instead of its own latest one. Needs the same number of replicas everywhere. Stage s of p then
            keeps p versions, where stashing alone keeps p - s: late stages make versions long before the
            micro-batches that use them arrive, and each version is used by some micro-batch.

    Source: PipeDream, sections 2.4.2 and 2.4.3.
    """
    _check(layout, 1)
    if not vertical_sync:
        return _program(layout, 1, lambda stage, k, updates: updates)
    replicas = {len(stage.ranks) for stage in layout.stages}
    if len(replicas) > 1:
        raise ProgramError("vertical sync needs the same number of replicas at every stage.")
    (count,) = replicas
    admitted = in_flight(layout)[0]
    return _program(layout, 1, lambda stage, k, updates: max(0, k // count - admitted + 1))


def two_bw(layout: Layout, batch: int) -> Program:
    """PipeDream-2BW: an update each `batch` micro-batches, two versions of the weights.

    Micro-batch k, counted from 0 on its replica, uses version max(k // batch - 1, 0).

    Args:
        layout: One stage a rank, one micro-batch size.
        batch: Micro-batches of one replica in a batch; at least as many as one admits.

    Source: PipeDream-2BW, section 3.2.1.
    """
    _check(layout, batch)
    if batch < max(in_flight(layout)):
        raise ProgramError(
            f"2BW needs at least as many micro-batches in a batch as are in flight, {max(in_flight(layout))};"
            f" {batch} are too few for two versions to be enough."
        )
    counts = [len(stage.ranks) for stage in layout.stages]
    return _program(layout, batch, lambda stage, k, updates: max(k // counts[stage] // batch - 1, 0))


def _program(layout: Layout, batch: int, version: Version) -> Program:
    admitted = in_flight(layout)
    ranks = []
    for r in range(layout.ranks):
        stage = only_stage(layout, r)
        order = alternate(stage, layout.owned(stage, r), admitted[stage])
        reduces = len(layout.stages[stage].ranks) > 1
        ranks.append(tuple(_with_stashes(list(_with_updates(order, batch, reduces, version)))))
    return Program(with_updates(layout, batch), tuple(ranks))


def _with_updates(order: Iterable[Compute], batch: int, reduces: bool, version: Version) -> Iterator[Action]:
    used: dict[int, int] = {}
    done = updates = 0
    for step in order:
        if step.kind is Kind.FORWARD:
            used[step.micro_batch] = version(step.stage, step.micro_batch, updates)
        yield step._replace(version=used[step.micro_batch])
        if step.kind is Kind.BACKWARD:
            done += 1
            if done % batch == 0:
                updates += 1
                if reduces:
                    yield Weights(Kind.REDUCE, step.stage, updates)
                yield Weights(Kind.UPDATE, step.stage, updates)


def _with_stashes(actions: list[Action]) -> Iterator[Action]:
    last = {a.version: i for i, a in enumerate(actions) if isinstance(a, Compute)}
    for i, action in enumerate(actions):
        if isinstance(action, Weights) and action.kind is Kind.UPDATE:
            overwritten = action.version - 1
            if last.get(overwritten, -1) > i:
                yield Weights(Kind.STASH, action.stage, overwritten)
        yield action


def _check(layout: Layout, batch: int) -> None:
    if batch < 1:
        raise ProgramError(f"a batch of {batch} micro-batches is none.")
    if len({stage.size for stage in layout.stages}) > 1:
        raise ProgramError("a schedule that never flushes needs one micro-batch size at every stage.")
    for s, stage in enumerate(layout.stages):
        if layout.micro_batches(s) % (batch * len(stage.ranks)):
            raise ProgramError(
                f"stage {s}: {layout.micro_batches(s)} micro-batches are no whole number of rounds of"
                f" {batch} on each of {len(stage.ranks)} replicas."
            )
