from __future__ import annotations

import pytest
import torch

from pipeline.passes import add_communication
from pipeline.program import chain
from pipeline.runtime import StageModule
from pipeline.runtime.reference import run_in_one_process
from pipeline.schedules import one_f_one_b
from tests.pipeline.runtime.models import make_data, make_stage
from tests.pipeline.runtime.test_numerics import differences


def expected(samples: int, data) -> list[dict]:
    """Weights after a step of one process, whose micro-batches have so many samples."""
    program = one_f_one_b(chain(4, [1, 1], sizes=[samples, samples]))
    modules = [make_stage(program.layout, s, dropout=0.0, tokens=False).module for s in range(2)]
    stages = [StageModule(m, torch.optim.SGD(m.parameters(), lr=0.01)) for m in modules]
    run_in_one_process(program, stages, data)
    return [{n: p.detach().numpy() for n, p in m.named_parameters()} for m in modules]


@pytest.mark.parametrize("how", ["fsdp", "tensor parallel"])
def test_two_processes_can_be_one_rank(how, four):
    program = add_communication(one_f_one_b(chain(4, [1, 1], sizes=[2, 2])))
    results = four.run("sharded", str(program), how)
    if how == "fsdp":
        both = [make_data(program.layout, seed) for seed in range(2)]
        data = {
            s: [
                torch.cat([t.view(4, 2, -1) for t in pair], 1).view(16, -1)
                for pair in zip(both[0][s], both[1][s], strict=True)
            ]
            for s in both[0]
        }
        weights = expected(4, data)
    else:
        weights = expected(2, make_data(program.layout))
    for result in results:
        assert all(difference < 1e-12 for *_, difference in differences(result, weights))
