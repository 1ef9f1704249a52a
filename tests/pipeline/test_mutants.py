"""Break programs in every way; whatever changes results, hangs or holds more must be rejected."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipeline.actions import Action, Compute, Message, Transfer, Wait, Weights
from pipeline.memory import peaks
from pipeline.plans import StageCost
from pipeline.program import Program, with_ranks
from pipeline.validator import check
from tests.pipeline.machine import outcome
from tests.pipeline.programs import PROGRAMS

COUNT = StageCost(saved_bytes=1.0, input_bytes=1.0)  # the machine counts micro-batches, recomputed or not
PER_PROGRAM = 120  # for each program and both ways of matching: more than 2,000 in all


def retag(rng: random.Random, action: Action, program: Program) -> Action:
    """The same action about something else."""
    if isinstance(action, Wait):
        return Wait(retag(rng, action.on, program))  # type: ignore[arg-type]
    other = rng.choice([-1, 1])
    if isinstance(action, Compute):
        field = rng.choice(["micro_batch", "version", "stage"])
    elif isinstance(action, Weights):
        field = rng.choice(["version", "stage"])
    elif isinstance(action, Transfer):
        field = rng.choice(["micro_batch", "peer", "stage"])
    else:
        assert isinstance(action, Message)
        field = rng.choice(["peer", "source", "target", "samples", "gradient"])
        if field == "gradient":
            return action._replace(gradient=not action.gradient)
        if field == "samples":
            shift = other * (action.stop - action.start)
            start = max(0, action.start + shift)
            return action._replace(start=start, stop=start + action.stop - action.start)
    return action._replace(**{field: max(0, getattr(action, field) + other)})


def mutant(rng: random.Random, program: Program) -> tuple[str, Program]:
    """The program with one thing changed, and what was done to it."""
    ranks = [list(actions) for actions in program.ranks]
    r = rng.randrange(len(ranks))
    actions = ranks[r]
    i = rng.randrange(len(actions))
    how = rng.choice(["drop", "duplicate", "swap", "move", "retag"])
    if how == "drop":
        del actions[i]
    elif how == "duplicate":
        actions.insert(rng.randint(0, len(actions)), actions[i])
    elif how == "swap":
        j = min(i + rng.randint(1, 4), len(actions) - 1)
        actions[i], actions[j] = actions[j], actions[i]
    elif how == "move":
        actions.insert(rng.randint(0, len(actions) - 1), actions.pop(i))
    else:
        actions[i] = retag(rng, actions[i], program)
    return how, with_ranks(program, ranks)


@pytest.mark.parametrize("matching", ["tags", "fifo"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_harmful_mutant_is_rejected(name, matching):
    program = PROGRAMS[name]()
    costs = [COUNT] * len(program.layout.stages)
    bound = max(peaks(program, costs))
    right, most = outcome(program, matching)
    assert right not in ("crash", "hang")
    assert most == bound
    assert not check(program, costs=costs, memory_bytes=bound, matching=matching)
    rng = random.Random(f"{name} {matching}")
    counts = Counter()
    for _ in range(PER_PROGRAM):
        how, broken = mutant(rng, program)
        result, held = outcome(broken, matching)
        harmful = result != right or held > bound
        rejected = bool(check(broken, costs=costs, memory_bytes=bound, matching=matching))
        counts[harmful, rejected] += 1
        assert rejected or not harmful, f"{how} is accepted:\n{broken}"
    assert counts[True, True] > PER_PROGRAM / 3  # the mutants are worth something
    assert len(PROGRAMS) * 2 * PER_PROGRAM >= 2000


def test_a_program_that_only_does_independent_things_in_another_order_is_accepted():
    program = PROGRAMS["gpipe"]()
    rng = random.Random(0)
    accepted = 0
    for _ in range(200):
        _, changed = mutant(rng, program)
        accepted += changed != program and not check(changed)
    assert accepted > 0
