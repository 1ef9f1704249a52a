"""Runs a generated program eagerly and by co-execution, and compares everything that can be observed."""

from __future__ import annotations

import functools
import operator
import warnings
from dataclasses import dataclass

import coexec
from tests.coexec.harness import assert_blocks_fit, difference, eager_tape, run
from tests.fuzz.programs import STEPS, Generated


@dataclass
class Tally:
    """What the programs so far have come to."""

    programs: int = 0
    raised: int = 0
    """Programs of which a step raised in eager execution."""
    steps: int = 0
    coexecuted: int = 0

    def __str__(self):
        share = self.coexecuted / self.steps if self.steps else 0
        return (
            f"{self.programs} generated programs equal eager; {self.raised} of them raise in some step;"
            f" {share:.0%} of {self.steps} steps were co-executed"
        )


#: Of this process.
tally = Tally()


def check(program: Generated, *, every: int = 1, same=operator.eq, **options) -> None:
    """Compare a program under co-execution with eager, after each step or after `every` so many.

    Args:
        program: what to run.
        every: how many steps.
        same: whether two observations are equal.
        options: of `GradientTape`.

    Raises:
        AssertionError: if anything differs; its message names the step, what differs, and the phases.
    """
    make, step = program.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coexec.reset()
        eager = run(make, step, STEPS, eager_tape, every)
        ours = run(make, step, STEPS, functools.partial(coexec.GradientTape, **options), every)
    explanation = coexec.explain()
    assert_blocks_fit(explanation.programs)
    for k, (a, b) in enumerate(zip(eager, ours, strict=True)):
        for what in ("raised", "printed", "returned", "state", "random"):
            x, y = getattr(a, what), getattr(b, what)
            assert same(x, y), f"step {k}, {what}: {difference(x, y, same=same)}\n{explanation.summary()}"
    tally.programs += 1
    tally.raised += any(a.raised for a in eager)
    for report in explanation.programs:
        tally.steps += sum(report.steps.values())
        tally.coexecuted += report.steps.get("co-execution", 0)
    coexec.reset()
