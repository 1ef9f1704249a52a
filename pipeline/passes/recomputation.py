"""Recompute instead of keep: run the forward pass again right before the backward pass.

In:  a program, and the stages to recompute.
Out: the same with an `RC` before the first part of each of their backward passes. A micro-batch that has an
     `RC` keeps only its input from its forward pass on.
"""

from __future__ import annotations

from collections.abc import Collection

from pipeline.actions import Action, Compute, Kind
from pipeline.program import Program, with_ranks


def recompute(program: Program, stages: Collection[int]) -> Program:
    """Recompute the given stages; the order of everything else stays."""
    ranks = []
    for actions in program.ranks:
        out: list[Action] = []
        for action in actions:
            if (
                isinstance(action, Compute)
                and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                and action.stage in stages
            ):
                out.append(action._replace(kind=Kind.RECOMPUTE))
            out.append(action)
        ranks.append(out)
    return with_ranks(program, ranks)
