"""TVM: its tuning process, and tunings in the cost log."""

from __future__ import annotations

import pickle
import subprocess

import pytest
import torch
from torch import nn

from placement.backends import tvm_tuning
from placement.backends.optional import missing_packages
from placement.backends.tvm import TVM, with_constants_as_inputs
from placement.capture import capture
from placement.measuring.log import CostLog
from placement.segments import whole
from tests.placement.graphs import seeded


class Module:
    """Stands where TVM's module would; only its text is asked for."""

    def script(self) -> str:
        return "text"


def test_a_tuning_is_kept_in_the_log_and_found_again(monkeypatch):
    log = CostLog(None)
    calls = []

    def tuned(script, target, trials, seconds):
        calls.append((script, trials))
        return tvm_tuning.Tuning("workloads", "records")

    monkeypatch.setattr(tvm_tuning, "_tune", tuned)
    for _ in range(2):
        found = tvm_tuning.tune("name", Module(), {}, 5, 1.0, log)
        assert found == tvm_tuning.Tuning("workloads", "records")
    assert calls == [("text", 5)]
    assert tvm_tuning.tune("other", Module(), {}, 0, 1.0, log) is None


def test_a_tuning_that_takes_too_long_leaves_the_segment_untuned(monkeypatch, caplog):
    def late(*arguments):
        raise subprocess.TimeoutExpired("tuning", 1.0)

    monkeypatch.setattr(tvm_tuning, "_tune", late)
    assert tvm_tuning.tune("name", Module(), {}, 5, 1.0, CostLog(None)) is None
    assert "the segment stays untuned" in caplog.text


def test_a_child_process_gets_the_backend_without_the_log():
    backend = TVM(trials=3)
    backend.attach(CostLog(None))
    assert pickle.loads(pickle.dumps(backend)).trials == 3


@torch.no_grad()
def test_constants_become_inputs():
    model, x = seeded(nn.Linear(3, 2)), torch.randn(4, 3)
    module, constants = with_constants_as_inputs(whole(capture(model, (x,)).graph).module)
    assert torch.equal(module(x, *constants)[0], model(x))


@pytest.mark.slow
@pytest.mark.skipif(missing_packages("tvm") is not None, reason=str(missing_packages("tvm")))
@torch.no_grad()
def test_tuning_runs_without_pytorch_and_its_result_is_used():
    model, x = seeded(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), torch.randn(8, 16)
    segment = whole(capture(model, (x,)).graph)
    backend, log = TVM(trials=2, tuning_s=900), CostLog(None)
    backend.attach(log)
    run = backend.compile(backend.lower(segment), segment)
    torch.testing.assert_close(run(x)[0], model(x), rtol=1e-4, atol=1e-5)
    assert log._connection.execute("SELECT count(*) FROM tuning").fetchone() == (1,)
