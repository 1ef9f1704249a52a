from __future__ import annotations

import pytest

from pipeline.calibration import BANDWIDTH, CONFIGURATIONS, configuration, fit
from pipeline.cli.comparison import predict
from pipeline.plans import StageCost
from pipeline.runtime.job import program_of
from pipeline.validator import check

COSTS = (StageCost(0.02, 0.04, output_bytes=1024.0),) * 4


def test_the_fitted_latency_is_the_one_that_explains_what_was_measured():
    job = configuration("1f1b", 4, 8, 1024)
    measured = predict(job, COSTS, 0.003, BANDWIDTH)["predicted_s"]
    assert fit(job, COSTS, measured) == pytest.approx(0.003, rel=0.01)


@pytest.mark.parametrize("job", CONFIGURATIONS, ids=lambda job: f"{job.schedule}-{job.ranks}")
def test_every_configuration_is_a_valid_program(job):
    program = program_of(job, job.options["layers"])
    assert len(program.ranks) == job.ranks
    assert check(program) == []


def test_there_are_at_least_twelve_configurations_besides_the_one_that_is_fitted():
    assert len(set(map(str, CONFIGURATIONS))) >= 13
