from __future__ import annotations

import pytest
import torch

from pipeline.passes import add_communication, recompute
from pipeline.program import Program, chain
from pipeline.runtime import StageModule
from pipeline.runtime.job import with_samples
from pipeline.runtime.reference import run_in_one_process
from pipeline.schedules import gpipe, one_f_one_b, pipedream, two_bw, zb_h1
from tests.pipeline.runtime.models import make_data, make_stage
from tests.pipeline.runtime.pool import RankFailure
from tests.pipeline.runtime.test_numerics import differences

SPLIT, STASHES = ["zb-h1"], ["pipedream", "2bw"]
SCHEDULES = {
    "gpipe": lambda: gpipe(chain(6, [1, 1])),
    "1f1b": lambda: one_f_one_b(chain(6, [1, 1])),
    "1f1b, recomputed": lambda: recompute(one_f_one_b(chain(6, [1, 1])), {0, 1}),
    "zb-h1": lambda: zb_h1(2, 6),
    "pipedream": lambda: pipedream(chain(6, [1, 1])),
    "2bw": lambda: two_bw(chain(6, [1, 1]), 3),
}


def expected(program: Program, data) -> list[dict]:
    """Weights after a run of one process."""
    modules = [make_stage(program.layout, s, dropout=0.0, tokens=False).module for s in range(2)]
    stages = [StageModule(m, torch.optim.SGD(m.parameters(), lr=0.01)) for m in modules]
    run_in_one_process(program, stages, data)
    return [{n: p.detach().numpy() for n, p in m.named_parameters()} for m in modules]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("ddp", name) for name in SCHEDULES),
        *(("fsdp", name) for name in SCHEDULES if name not in SPLIT + STASHES),
        *(("tensor parallel", name) for name in SCHEDULES if name not in STASHES),
    ],
)
def test_two_processes_can_be_one_rank(how, name, four):
    program = add_communication(with_samples(SCHEDULES[name](), 2))
    results = four.run("sharded", str(program), how)
    if how == "tensor parallel":
        weights = expected(program, make_data(program.layout))
    else:  # each process has micro-batches of 2 samples; together they are of 4
        both = [make_data(program.layout, seed) for seed in range(2)]
        data = {
            s: [
                torch.cat([t.view(6, 2, -1) for t in pair], 1).view(24, -1)
                for pair in zip(both[0][s], both[1][s], strict=True)
            ]
            for s in both[0]
        }
        weights = expected(with_samples(SCHEDULES[name](), 4), data)
    for result in results:
        assert all(difference < 1e-12 for *_, difference in differences(result, weights))


@pytest.mark.parametrize(
    ("how", "name", "message"),
    [
        *(("fsdp", name, "stage 0 is sharded by FSDP") for name in SPLIT),
        ("fsdp", "pipedream", "stage 0 has distributed parameters"),
        ("tensor parallel", "pipedream", "stage 0 has distributed parameters"),
    ],
)
def test_what_sharded_stages_cannot_do_is_refused_before_anything_runs(how, name, message, four):
    program = add_communication(with_samples(SCHEDULES[name](), 2))
    with pytest.raises(RankFailure, match=message):
        four.run("sharded", str(program), how)
