"""Whether a recording does what eager did, before it is ever used.

In:  a recording, and the outputs that eager has just computed from the same arguments.
Out: None, or what differs: a value, metadata, or the autograd graph.

Operations are recorded below autograd and run with autograd; nearly always that makes eager's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coexec.dynamic.recorder import Recording


class TrialFailed(Exception):
    """The recording could not be run."""


def needs_trial(recording: Recording, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is anything that running the operations again could make differently."""
    return len(recording.operations) != 1 or takes_part_in_autograd(tensors)


def takes_part_in_autograd(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd sees a call on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def difference(eager: Sequence[torch.Tensor], again: Callable[[], Sequence[torch.Tensor]]) -> str | None:
    """Compares what eager computed with what `again` computes; None if nothing differs.

    Args:
        eager: the outputs of the call.
        again: runs the recording, which writes to no argument, on the call's arguments; raises
            `TrialFailed`.
    """
    try:
        outputs = again()
    except TrialFailed:
        return "run again, it fails"
    for ours, theirs in zip(outputs, eager, strict=True):
        if not _same_values(ours.detach(), theirs.detach()):
            return "run again, it computes other values"
        if ours._is_view() != theirs._is_view():
            return "run again, it makes no view where eager does"
        if not _same_graph(ours.grad_fn, theirs.grad_fn, {}):
            return "run again, it makes another autograd graph"
    return None


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def _same_graph(a: Any, b: Any, seen: dict[Any, Any]) -> bool:
    """Whether two graphs are equal down to the nodes that they share: those of the arguments."""
    if a is b:
        return True
    if a is None or b is None or type(a) is not type(b):
        return False
    if a in seen:
        return seen[a] is b
    seen[a] = b
    return len(a.next_functions) == len(b.next_functions) and all(
        i == j and _same_graph(x, y, seen)
        for (x, i), (y, j) in zip(a.next_functions, b.next_functions, strict=True)
    )
