"""BPipe's transfer schedule for one evictor: which micro-batch moves away, which comes back, and when.

In:  the forward and backward passes of one rank in time, and how many micro-batches it may hold.
Out: one `Slot` for each pass, with what is evicted or loaded beside it.

What a slot holds is what is resident when it begins, what it makes, and what it loads; what it evicts is gone
when it is over. Each slot evicts at most one and loads at most one, so that transfers hide behind
computation.

Source: BPipe, sections 3.4 and appendix A (the dissertation's Algorithm 2). Instead of "the latest forward"
the victim is always the one that is needed furthest in the future; for 1F1B these are the same, for
interleaved 1F1B only the latter is right. Instead of counting evictions ahead, a slot evicts exactly when the
next one would hold too much; the tests show the number of transfers to be minimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.actions import Compute, Kind
from pipeline.errors import ProgramError
from pipeline.timeline import Span

Item = tuple[int, int]
"""What is held: a stage and a micro-batch."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One pass and the transfers beside it.

    Attributes:
        span: The pass.
        evict: What leaves while the pass runs.
        load: What comes back while it runs.
        load_after: What comes back after it, in the gap before the next pass.
    """

    span: Span
    evict: Item | None = None
    load: Item | None = None
    load_after: Item | None = None


def balanced_capacity(ranks: int, chunks: int = 1) -> int:
    """Micro-batches that each rank holds at most when they are balanced.

    Evictor and acceptor hold so many together, plus one in transit, and each takes half, rounded up:
    ceil((p+2)/2) for 1F1B; pv+1 chunks for interleaved 1F1B.

    Source: BPipe, section 3.3 and appendix A.
    """
    return -(-(ranks + 2) // 2) if chunks == 1 else ranks * chunks + 1


def transfer_schedule(spans: Sequence[Span], capacity: int, transfer: float) -> tuple[Slot, ...]:
    """Transfers that keep a rank within its capacity.

    Args:
        spans: Its forward and backward passes.
        capacity: Micro-batches, or chunks of them, that it may hold; at least 3.
        transfer: Time of one transfer, in the unit of the spans; a gap that long is used for loading.

    Raises:
        ProgramError: The capacity is too small for one transfer beside each pass.
    """
    backward_at = {_item(s.action): i for i, s in enumerate(spans) if s.action.kind is not Kind.FORWARD}
    resident: set[Item] = set()
    away: set[Item] = set()
    slots: list[Slot] = []
    loads: dict[int, Item] = {}
    for i, span in enumerate(spans):
        own = _item(span.action)
        before = set(resident)
        resident.add(own)
        load = loads.pop(i, None)
        if load is not None:
            away.discard(load)
            resident.add(load)
        _check(resident, capacity, span)
        if span.action.kind is not Kind.FORWARD:
            if own in away:
                raise ProgramError(f"{span.action}: what it needs can't be back in time. Allow more.")
            resident.discard(own)
        after = _load_in_gap(spans, i, away, transfer)
        upcoming = _load_beside(spans, i + 1, away, transfer)
        if upcoming is not None:
            loads[i + 1] = upcoming
        new = i + 1 < len(spans) and spans[i + 1].action.kind is Kind.FORWARD
        demand = len(resident) + (after is not None) + new + (upcoming is not None)
        evict = None
        if demand > capacity:
            evict = max(before - {own}, key=backward_at.__getitem__, default=None)
            if evict is not None:
                resident.discard(evict)
                away.add(evict)
        if after is not None:
            away.discard(after)
            resident.add(after)
            _check(resident, capacity, span)
        slots.append(Slot(span, evict, load, after))
    return tuple(slots)


def _item(action: Compute) -> Item:
    return action.stage, action.micro_batch


def _next_away(spans: Sequence[Span], i: int, away: set[Item]) -> Item | None:
    """What slot i needs although it has been moved away."""
    if (
        i < len(spans)
        and spans[i].action.kind is not Kind.FORWARD
        and (own := _item(spans[i].action)) in away
    ):
        return own
    return None


def _has_gap(spans: Sequence[Span], i: int, transfer: float) -> bool:
    """Whether a transfer fits between slot i and the next one, both being backward passes."""
    return (
        i + 1 < len(spans)
        and spans[i].action.kind is not Kind.FORWARD
        and spans[i + 1].start - spans[i].end >= transfer * (1 - 1e-9)
    )


def _load_in_gap(spans: Sequence[Span], i: int, away: set[Item], transfer: float) -> Item | None:
    return _next_away(spans, i + 1, away) if _has_gap(spans, i, transfer) else None


def _load_beside(spans: Sequence[Span], i: int, away: set[Item], transfer: float) -> Item | None:
    """What must be loaded beside slot i, since slot i + 1 needs it and there is no gap between them."""
    return None if _has_gap(spans, i, transfer) else _next_away(spans, i + 1, away)


def _check(resident: set[Item], capacity: int, span: Span) -> None:
    if len(resident) > capacity:
        raise ProgramError(
            f"{span.action}: {len(resident)} micro-batches are held where {capacity} are allowed;"
            " transfers can't keep up. Allow more."
        )
