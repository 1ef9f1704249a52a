from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipeline.memory import memory_traces
from pipeline.passes import add_communication, bpipe, recompute
from pipeline.program import Program, chain
from pipeline.schedules import interleaved, one_f_one_b, pipedream, two_bw, zb_h1, zbv
from tests.pipeline.runtime.pool import Pool
from tests.pipeline.runtime.test_numerics import merged, single_process

GPUS = torch.cuda.device_count()
ONE = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
TWO = pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs: NCCL joins one process a GPU")
FOUR = pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs: BPipe has nothing to move with fewer stages")

TWO_RANKS = {
    "1f1b": one_f_one_b(chain(6, [1, 1], sizes=[2, 2])),
    "interleaved": interleaved(2, 4, 2),
    "zb-h1": zb_h1(2, 6),
    "pipedream": pipedream(chain(8, [1, 1])),
    "2bw": two_bw(chain(12, [1, 1]), 3),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    pool = Pool(2, "nccl")
    yield pool
    pool.stop()


def check_losses(program: Program, pool: Pool, runs: int = 2) -> None:
    program = add_communication(program)
    results = pool.run("train_on_gpu", str(program), runs, 0.0)
    losses, _ = single_process(program, runs, dropout=0.0)  # on the CPU, which rounds in another way
    for found, expected in zip(merged(results, runs), losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


@TWO
@pytest.mark.parametrize("name", TWO_RANKS)
def test_losses_over_nccl_are_those_of_one_process(name, two):
    check_losses(TWO_RANKS[name], two)


@TWO
def test_recomputation_draws_the_same_dropout_on_a_gpu(two):
    plain = TWO_RANKS["1f1b"]
    results = [
        merged(two.run("train_on_gpu", str(add_communication(program)), 2, 0.3), 2)
        for program in (plain, recompute(plain, {0, 1}))
    ]
    assert results[0] == results[1]


@TWO
def test_the_bytes_held_on_a_gpu_are_those_predicted(two):
    program = add_communication(TWO_RANKS["1f1b"])
    results = two.run("train_on_gpu", str(program), 1, 0.0)
    predicted = memory_traces(program, results[0]["costs"])
    assert [result["held"][0] for result in results] == list(predicted)


@FOUR
def test_bpipe_over_nccl_gives_the_losses_of_one_process():
    pool = Pool(4, "nccl")
    try:
        check_losses(bpipe(one_f_one_b(chain(8, [1, 1, 1, 1]))), pool)
    finally:
        pool.stop()


@ONE
def test_one_rank_trains_on_a_gpu():
    pool = Pool(1, "nccl")
    try:
        check_losses(zbv(1, 4), pool)
    finally:
        pool.stop()
