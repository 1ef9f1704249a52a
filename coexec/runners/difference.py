"""Why an event is none of the graph's, in words.

In:  an event, and the node that was nearest to it.
Out: a sentence for `coexec.explain()`.
"""

from __future__ import annotations

from typing import Any

from coexec.runners.iteration import Iteration
from coexec.runners.skeleton import Skeleton
from coexec.tracegraph import functions
from coexec.tracegraph.graph import Node
from coexec.tracegraph.numbers import fit
from coexec.tracegraph.trace import Number


def difference(
    iteration: Iteration,
    skeleton: Skeleton,
    function: Any,
    nearest: Node | None,
    key: Any,
    numbers: list[Number],
    refused: str | None,
) -> str:
    """What distinguishes an event from the nearest node, for `explain`; `refused` says it of a size."""
    name = functions.name_of(function)
    if nearest is None:
        expected = [n.name for n in skeleton.children.get(iteration.at, ())]
        return f"{name} where the traces go on with {' or '.join(expected) or 'the end of the block'}"
    if refused is not None:
        return f"{name} with {refused}"
    if nearest.key != key:
        parts = ("arguments", "ambient state", "metadata of its tensors")
        different = [p for p, a, b in zip(parts, nearest.key, key, strict=True) if a != b]  # type: ignore[call-overload]
        return f"{name} with other {' and '.join(different)}"
    if not fit(nearest.numbers, numbers):
        return f"{name} with numbers {numbers} where traces had {[s.value for s in nearest.numbers]}"
    return f"{name} on other tensors than in any trace"
