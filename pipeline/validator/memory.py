"""No rank holds more than it may."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.memory import memory_traces
from pipeline.plans import StageCost
from pipeline.program import Program
from pipeline.validator.problems import Problem, problem


def memory_problems(program: Program, costs: Sequence[StageCost], memory_bytes: float) -> list[Problem]:
    """The first action of each rank during which it holds more than `memory_bytes`."""
    problems = []
    for r, trace in enumerate(memory_traces(program, costs)):
        for i, held in enumerate(trace):
            if held > memory_bytes:
                reason = f"the rank holds {held:.0f} bytes here; it may hold {memory_bytes:.0f}"
                problems.append(problem(program, r, i, reason))
                break
    return problems
