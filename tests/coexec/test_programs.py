"""Two programs of the suite: bit for bit eager's over 200 steps, co-executed after at most 4 traces."""

from __future__ import annotations

import contextlib

import pytest
import torch

import coexec
from bench.modes import start_run
from bench.programs import PROGRAMS
from bench.state import compare_runs

slow = pytest.mark.slow
STEPS = 200


@pytest.mark.parametrize("name", ["digits", "charlm"])
@pytest.mark.parametrize("preset", ["tiny", pytest.param("small", marks=slow)])
def test_a_program_of_the_suite_equals_eager(name, preset):
    program = PROGRAMS[name]
    runs = [start_run(program, "eager", seed=1, preset=preset) for _ in range(2)]
    tapes = (contextlib.nullcontext, coexec.GradientTape)
    losses = ([], [])

    for _ in range(STEPS):
        for run, mine, tape in zip(runs, losses, tapes, strict=True):
            with run.active():
                mine.append(run.training.step(tape).item())
                run.steps += 1
                run.finish_epoch_if_due()

    difference = compare_runs(runs[1], losses[1], runs[0], losses[0])
    assert difference.equal, difference.first
    [report] = coexec.explain().programs
    assert report.traces <= 4, report.summary()
    assert report.phase == "co-execution"
    assert report.steps["co-execution"] == STEPS - report.traces
    assert report.fallbacks <= report.traces
    assert all(torch.isfinite(torch.tensor(mine)).all() for mine in losses)
