from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipeline.actions import Compute
from pipeline.passes import add_communication, bpipe, recompute
from pipeline.program import Layout, Program, StageLayout, chain
from pipeline.runtime import Options
from pipeline.runtime.reference import run_in_one_process
from pipeline.schedules import gpipe, interleaved, one_f_one_b, pipedream, two_bw, zb_h1, zbv
from tests.pipeline.runtime.models import make_data, make_stage

RUNS = 2

FOUR = chain(8, [1, 1, 1, 1], sizes=[2, 2, 2, 2])
ASYNCHRONOUS = chain(20, [1, 1, 1, 1], sizes=[2, 2, 2, 2])

# Their gradients are added up in the order of micro-batches, as one process does.
SAME_ORDER: dict[str, Program] = {
    "gpipe": gpipe(FOUR),
    "1f1b": one_f_one_b(FOUR),
    "1f1b, recomputed": recompute(one_f_one_b(FOUR), {0, 2}),
    "interleaved": interleaved(4, 8, 2),
    "zb-h1": zb_h1(4, 8),
    "zbv": zbv(4, 8),
    "bpipe": bpipe(one_f_one_b(FOUR)),
    "bpipe, recomputed": recompute(bpipe(one_f_one_b(FOUR)), {0, 1}),
    "bpipe, interleaved": bpipe(interleaved(4, 8, 2)),
    "pipedream": pipedream(ASYNCHRONOUS),
    "pipedream, vertical sync": pipedream(ASYNCHRONOUS, vertical_sync=True),
    "2bw": two_bw(chain(80, [1, 1, 1, 1]), 4),
}

DIAMOND = Layout(
    (StageLayout(4, (0,), 24), StageLayout(2, (1,), 24), StageLayout(6, (2,), 24), StageLayout(4, (3,), 24)),
    ((0, 1), (0, 2), (1, 3), (2, 3)),
    24,
)

# Replicas, or stages with micro-batches of several sizes, add in another order.
OTHER_ORDER: dict[str, Program] = {
    "1f1b, two replicas": one_f_one_b(chain(6, [2, 2])),
    "1f1b, replicas 1-2-1": one_f_one_b(chain(6, [1, 2, 1])),
    "1f1b, replicas 3-1": one_f_one_b(chain(6, [3, 1])),
    "1f1b, sizes 4-2-6-3": one_f_one_b(chain(6, [1, 1, 1, 1], sizes=[4, 2, 6, 3])),
    "1f1b, sizes 4-2-6, replicas 1-2-1": one_f_one_b(chain(6, [1, 2, 1], sizes=[4, 2, 6])),
    "gpipe, diamond": gpipe(DIAMOND),
    "1f1b, diamond, recomputed": recompute(one_f_one_b(DIAMOND), {1, 2}),
    "interleaved, two replicas": interleaved(2, 4, 2, replicas=2),
    "pipedream, replicas 2-1-1": pipedream(chain(12, [2, 1, 1])),
    "2bw, two replicas": two_bw(chain(12, [2, 2]), 3),
}


def single_process(program: Program, runs: int, **model: Any) -> tuple[list[dict], list[dict]]:
    """Losses of each run, and weights of each stage at the end."""
    layout = program.layout
    stages = [make_stage(layout, s, **model) for s in range(len(layout.stages))]
    losses = []
    for run in range(runs):
        found = run_in_one_process(program, stages, make_data(layout, run), run=run)
        losses.append({key: loss.item() for key, loss in found.items()})
    return losses, [{n: p.detach().numpy() for n, p in stage.module.named_parameters()} for stage in stages]


def merged(results: list[dict], runs: int) -> list[dict]:
    return [{k: v for result in results for k, v in result["losses"][run].items()} for run in range(runs)]


def differences(result: dict, weights: list[dict]) -> Iterator[tuple[int, str, float]]:
    """Stage, parameter and the largest difference, for what a rank has."""
    for s, parameters in result["weights"].items():
        for name, value in parameters.items():
            yield s, name, float(np.abs(value - weights[s][name]).max())


@pytest.mark.parametrize("name", SAME_ORDER)
def test_a_schedule_gives_the_bits_of_one_process(name, four):
    program = add_communication(SAME_ORDER[name])
    results = four.run("train", str(program), RUNS)
    losses, weights = single_process(program, RUNS)
    assert merged(results, RUNS) == losses
    assert all(np.isfinite(list(run.values())).all() for run in losses)
    for result in results:
        assert all(difference == 0 for *_, difference in differences(result, weights))


@pytest.mark.parametrize("name", OTHER_ORDER)
def test_another_order_of_addition_changes_rounding_alone(name, four):
    program = add_communication(OTHER_ORDER[name])
    results = four.run("train", str(program), RUNS)
    losses, weights = single_process(program, RUNS)
    for found, expected in zip(merged(results, RUNS), losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-12)
    for result in results:
        assert all(difference < 1e-12 for *_, difference in differences(result, weights))


@pytest.mark.parametrize("name", ["1f1b", "bpipe, interleaved", "2bw"])
def test_matching_in_order_gives_the_same_as_matching_by_tag(name, four):
    program = add_communication(SAME_ORDER[name])
    results = four.run("train", str(program), 1, Options(limit_s=20.0, matching="fifo"))
    losses, _ = single_process(program, 1)
    assert merged(results, 1) == losses


def test_an_optimizer_with_state_goes_on_where_it_was(four):
    program = add_communication(SAME_ORDER["bpipe"])
    results = four.run("train_with", str(program), 3, {"optimizer": "adam"})
    losses, _ = single_process(program, 3, optimizer="adam")
    assert merged(results, 3) == losses


def test_without_stashing_the_losses_would_be_others():
    """The reference does see delays: with the weights of the newest update everywhere, losses differ."""
    delayed = pipedream(ASYNCHRONOUS)
    newest = sequential_versions(delayed)
    assert single_process(delayed, 1)[0] != single_process(newest, 1)[0]


def sequential_versions(program: Program) -> Program:
    ranks = [
        tuple(a._replace(version=a.micro_batch) if isinstance(a, Compute) else a for a in actions)
        for actions in program.ranks
    ]
    return Program(program.layout, tuple(ranks))


EIGHT = chain(16, [1] * 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        bpipe(one_f_one_b(EIGHT)),
        recompute(interleaved(8, 8, 2), range(0, 16, 3)),
        zbv(8, 16),
        pipedream(chain(20, [1] * 8)),
        pipedream(chain(20, [1] * 8), vertical_sync=True),
        two_bw(chain(160, [1] * 8), 8),
    ],
    ids=["bpipe", "interleaved, recomputed", "zbv", "pipedream", "pipedream, vertical sync", "2bw"],
)
def test_eight_ranks_give_the_bits_of_one_process(program, eight):
    program = add_communication(program)
    results = eight.run("train", str(program), 1)
    losses, weights = single_process(program, 1)
    assert merged(results, 1) == losses
    for result in results:
        assert all(difference == 0 for *_, difference in differences(result, weights))
