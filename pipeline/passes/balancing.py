"""BPipe: early stages, which hold most, move some of what they saved to late stages, and get it back in time.

In:  a program of 1F1B or interleaved 1F1B, before communication is added.
Out: the same with transfers between rank s (evictor) and rank p-1-s (acceptor), so that no rank holds more
     than the balanced capacity.

The order of computation stays. Transfers start beside a pass of the evictor; the acceptor gets ready before
the pass that it runs at that time.

Source: BPipe, section 3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipeline.actions import Action, Compute, Kind, Transfer, Wait
from pipeline.errors import ProgramError
from pipeline.passes.transfers import Item, Slot, balanced_capacity, transfer_schedule
from pipeline.program import Layout, Program, with_ranks
from pipeline.timeline import Durations, Span, timeline, unit_durations

_SAME = 1e-9
"""Times closer than this are the same."""


def pairs(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Ranks that balance each other, evictor first: in each replica, rank s and rank p-1-s."""
    return tuple(
        (ordered[s], ordered[-1 - s]) for ordered in pipeline_ranks(layout) for s in range(len(ordered) // 2)
    )


def pipeline_ranks(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The ranks of each replica of the pipeline, in the order of the stages they hold first.

    Raises:
        ProgramError: Stages are replicated unequally, or chunks are not dealt out to ranks in turn.
    """
    stages = layout.stages
    p = layout.ranks // len(stages[0].ranks)
    if len(stages) % p or any(stage.ranks != stages[s % p].ranks for s, stage in enumerate(stages)):
        raise ProgramError("BPipe needs equal replicas and chunks that are dealt out to ranks in turn.")
    return tuple(tuple(stages[s].ranks[replica] for s in range(p)) for replica in range(len(stages[0].ranks)))


def bpipe(
    program: Program,
    *,
    capacity: int | None = None,
    durations: Durations | None = None,
    transfer: float | None = None,
) -> Program:
    """Balance what ranks hold.

    Args:
        program: 1F1B or interleaved 1F1B, computation only.
        capacity: Micro-batches, or chunks of them, that a rank may hold; the balanced number when left out.
        durations: How long passes take; forward 1 and backward 2 when left out.
        transfer: How long a transfer takes, in the same unit; as long as a forward pass when left out.
    """
    layout = program.layout
    replicas = pipeline_ranks(layout)
    chunks = len(layout.stages) // len(replicas[0])
    capacity = balanced_capacity(len(replicas[0]), chunks) if capacity is None else capacity
    durations = unit_durations(chunks) if durations is None else durations
    spans = timeline(program, durations)
    ranks: list[Sequence[Action]] = list(program.ranks)
    for evictor, acceptor in pairs(layout):
        time = durations(spans[evictor][0].action) if transfer is None else transfer
        slots = transfer_schedule(spans[evictor], capacity, time)
        ranks[evictor] = _evictor(program.ranks[evictor], slots, acceptor)
        accepting = _acceptor(program.ranks[acceptor], spans[acceptor], slots, evictor, time)
        ranks[acceptor] = _postponed(accepting, capacity)
    return with_ranks(program, ranks)


def _evictor(actions: Sequence[Action], slots: Sequence[Slot], peer: int) -> list[Action]:
    by_index = {slot.span.position: slot for slot in slots}
    pending: set[Item] = set()
    out: list[Action] = []
    for i, action in enumerate(actions):
        slot = by_index.get(i)
        if slot is None:
            out.append(action)
            continue
        own = (slot.span.action.stage, slot.span.action.micro_batch)
        if own in pending:
            pending.discard(own)
            out.append(Wait(Transfer(Kind.LOAD, *own, peer)))
        if slot.evict is not None:
            out.append(Transfer(Kind.EVICT, *slot.evict, peer))
        if slot.load is not None:
            out.append(Transfer(Kind.LOAD, *slot.load, peer))
        out.append(action)
        if slot.evict is not None:
            out.append(Wait(Transfer(Kind.EVICT, *slot.evict, peer)))
        if slot.load_after is not None:
            out.append(Transfer(Kind.LOAD, *slot.load_after, peer))
        pending |= {item for item in (slot.load, slot.load_after) if item is not None}
    return out


def _acceptor(
    actions: Sequence[Action], spans: Sequence[Span], slots: Sequence[Slot], peer: int, time: float
) -> list[Action]:
    starts = [span.start for span in spans]
    end = spans[-1].position + 1
    added: dict[int, list[tuple[float, bool, tuple[Action, ...]]]] = defaultdict(list)

    def active(at: float) -> int:
        """Index of the action that the acceptor runs at a time, or of the next one when it runs none."""
        n = bisect_right(starts, at + _SAME) - 1
        if n >= 0 and spans[n].end > at + _SAME:
            return spans[n].position
        return spans[n + 1].position if n + 1 < len(spans) else end

    def following(at: float) -> int:
        """Index of the first action that the acceptor starts at a time or later."""
        n = bisect_right(starts, at - _SAME)
        return spans[n].position if n < len(spans) else end

    for at, arrives, item in _events(slots, time):
        accept = Transfer(Kind.ACCEPT, *item, peer)
        back = Transfer(Kind.RETURN, *item, peer)
        if arrives:
            added[active(at)].append((at, True, (accept,)))
        else:
            added[active(at)].append((at, True, (Wait(accept), back)))
            # False sorts first: what frees memory goes before what takes some at the same time.
            added[following(at + time)].append((at + time, False, (Wait(back),)))
    out: list[Action] = []
    for i, action in enumerate((*actions, None)):
        for _, _, group in sorted(added.get(i, ()), key=lambda event: event[:2]):
            out += group
        if action is not None:
            out.append(action)
    return out


def _postponed(actions: list[Action], capacity: int) -> list[Action]:
    """The actions of an acceptor, with each `ACCEPT` that is one too many put off until something is let go.

    The acceptor gets ready before a pass that it is still running when the transfer starts; where passes are
    not twice as long backward as forward, that can be before it has room.
    """
    actions = list(actions)
    i = held = 0
    while i < len(actions):
        held += _growth(actions[i])
        if held <= capacity:
            i += 1
            continue
        last = next((n for n in range(i, -1, -1) if _is_accept(actions[n])), None)
        free = next((n for n in range(i + 1, len(actions)) if _growth(actions[n]) < 0), None)
        if last is None or free is None:
            raise ProgramError(f"{actions[i]}: its rank can't hold so much for others. Allow more.")
        actions.insert(free, actions.pop(last))  # right after `free`, which has moved one place forward
        held -= 1
    return actions


def _is_accept(action: Action) -> bool:
    return isinstance(action, Transfer) and action.kind is Kind.ACCEPT


def _growth(action: Action) -> int:
    """By how many micro-batches what an acceptor holds grows."""
    if isinstance(action, Compute):
        return 1 if action.kind is Kind.FORWARD else -1
    if isinstance(action, Wait):
        return -1 if action.on.kind is Kind.RETURN else 0
    return 1 if _is_accept(action) else 0


def _events(slots: Sequence[Slot], time: float) -> Iterator[tuple[float, bool, Item]]:
    """When each item goes to the acceptor (True) or back (False).

    It goes as late as the evictor's pass hides it: what the acceptor holds until then may have to go back
    first.
    """
    for slot in slots:
        if slot.evict is not None:
            yield max(slot.span.start, slot.span.end - time), True, slot.evict
        if slot.load is not None:
            yield slot.span.start, False, slot.load
        if slot.load_after is not None:
            yield slot.span.end, False, slot.load_after
