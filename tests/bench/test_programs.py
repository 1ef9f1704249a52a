import contextlib

import pytest
import torch

from bench.modes import start_run
from bench.program import PRESETS, missing_packages
from bench.programs import PROGRAMS
from bench.programs.charlm import read_text
from bench.state import compare_runs

EACH_PROGRAM = pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            id=program.name,
            marks=pytest.mark.skipif(
                bool(missing_packages(program)), reason=f"needs {', '.join(program.requires)}"
            ),
        )
        for program in PROGRAMS.values()
    ],
)


def train(run, steps):
    losses = []
    with run.active():
        for _ in range(steps):
            losses.append(run.training.step(run.tape).item())
            run.steps += 1
            run.finish_epoch_if_due()
    return losses


@EACH_PROGRAM
def test_a_program_learns(program):
    run = start_run(program, "eager", preset="tiny")

    losses = train(run, 100)

    assert sum(losses[-20:]) < 0.92 * sum(losses[:20])


@EACH_PROGRAM
def test_two_runs_of_one_seed_take_the_same_steps_even_when_they_are_interleaved(program):
    runs = [start_run(program, "eager", seed=3, preset="tiny") for _ in range(2)]
    losses = [[], []]

    for _ in range(12):
        for run, mine in zip(runs, losses, strict=True):
            mine += train(run, 1)

    difference = compare_runs(runs[0], losses[0], runs[1], losses[1])
    assert difference.equal, difference.first
    assert difference.max_abs == 0


@EACH_PROGRAM
def test_another_seed_is_another_run(program):
    runs = [start_run(program, "eager", seed=seed, preset="tiny") for seed in (0, 1)]

    losses = [train(run, 1) for run in runs]

    assert losses[0] != losses[1]


@EACH_PROGRAM
def test_a_run_leaves_the_random_generators_of_the_process_as_they_were(program):
    before = torch.get_rng_state()

    train(start_run(program, "eager", preset="tiny"), 2)

    assert torch.equal(torch.get_rng_state(), before)


@EACH_PROGRAM
def test_a_program_reads_its_loss_every_ten_steps(program):
    run = start_run(program, "eager", preset="tiny")

    losses = train(run, 21)

    assert run.training.logged == [(step, losses[step]) for step in (0, 10, 20)]


@EACH_PROGRAM
def test_evaluation_changes_nothing_that_training_sees(program):
    evaluated, other = (start_run(program, "eager", preset="tiny") for _ in range(2))

    with evaluated.active():
        evaluated.training.evaluate()

    assert train(evaluated, 2) == train(other, 2)


@EACH_PROGRAM
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_takes_a_step(program, preset):
    if preset == "full" and not torch.cuda.is_available():
        pytest.skip("the full preset is for a GPU")
    loss = program.make(0, preset).step(contextlib.nullcontext)

    assert torch.isfinite(loss)


def test_digits_ends_an_epoch_with_a_lower_learning_rate_and_its_accuracy():
    run = start_run(PROGRAMS["digits"], "eager", preset="tiny")
    rate = run.training.optimizer.param_groups[0]["lr"]

    train(run, run.training.steps_per_epoch)

    assert run.training.optimizer.param_groups[0]["lr"] < rate
    [(step, accuracy)] = run.metrics
    assert step == run.training.steps_per_epoch
    assert 0.3 < accuracy <= 1


def test_charlm_reads_the_same_text_each_time():
    text = read_text()

    assert torch.equal(text, read_text())
    assert len(text) > 100_000
    assert text.max() < 256
