"""Blocks are compiled by another process while the program goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import coexec
from coexec._native import core
from coexec.executors import background
from coexec.executors.background import Compilation
from coexec.executors.job import TOKEN, make_job

pytestmark = [
    pytest.mark.skipif(core is None, reason="compiled blocks need the native module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LIMIT_S = 240.0
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _background(tmp_path, monkeypatch):
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(coexec.options, "background", True)


def doubled():
    """The smallest block there is."""
    graph = torch.fx.Graph()
    token = graph.placeholder("token")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (token, 2)),))
    return make_job(torch.fx.GraphModule({}, graph), (TOKEN,))


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def step(s, tape):
    x = torch.randn(6, 8)
    with tape:
        loss = s.model(x).square().mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


def executors():
    [report] = coexec.explain().programs
    return {block.executor for block in report.blocks}


@slow
def test_a_program_goes_on_by_aten_until_its_blocks_are_compiled(caplog):
    caplog.set_level(logging.INFO, logger="coexec")
    s, eager = make(), make()

    for _ in range(6):
        step(s, coexec.GradientTape(executor="inductor"))
    [report] = coexec.explain().programs
    assert report.phase == "co-execution"
    assert executors() == {"aten"}
    assert report.compiling == 2  # the iteration, and its commit
    assert "being compiled" in report.summary()
    began = time.perf_counter()
    steps = 6
    while executors() != {"inductor"} and time.perf_counter() - began < LIMIT_S:
        step(s, coexec.GradientTape(executor="inductor"))
        steps += 1
    step(s, coexec.GradientTape(executor="inductor"))

    [report] = coexec.explain().programs
    assert executors() == {"inductor"}
    assert report.compiling == 0
    assert report.fallbacks == 0
    torch.manual_seed(0)
    make()
    for _ in range(steps + 1):
        step(eager, coexec.GradientTape(mode="eager"))
    for a, b in zip(s.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert [m for m in caplog.messages if "blocks compiled in" in m]


@slow
def test_what_is_on_disk_is_used_at_once():
    coexec.options.background = False
    s = make()
    for _ in range(5):
        step(s, coexec.GradientTape(executor="inductor"))
    coexec.reset()
    coexec.options.background = True

    s = make()
    for _ in range(5):
        step(s, coexec.GradientTape(executor="inductor"))

    assert executors() == {"inductor"}


@slow
def test_a_job_is_compiled_by_the_other_process():
    job = doubled()

    compilation = Compilation([job])
    compilation.wait()

    assert compilation.is_done()
    assert compilation.failure() is None
    assert job.path.exists()


@slow
def test_why_a_block_cannot_be_compiled_is_told(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import coexec.executors.job as job\n"
        "def fails(*a): raise NotImplementedError('TorchInductor fails: no such kernel')\n"
        "job.compile_ahead_of_time = fails\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    s = make()

    for _ in range(5):
        step(s, coexec.GradientTape(executor="inductor"))
    deadline = time.perf_counter() + LIMIT_S
    while coexec.explain().programs[0].compiling and time.perf_counter() < deadline:
        step(s, coexec.GradientTape(executor="inductor"))

    [report] = coexec.explain().programs
    assert executors() == {"aten"}
    assert [c.cause.partition(": ")[2] for c in report.causes] == ["TorchInductor fails: no such kernel"]


def test_a_process_that_is_given_nonsense_says_so(tmp_path):
    file = tmp_path / "jobs"
    file.write_bytes(b"nonsense")

    done = subprocess.run(
        [sys.executable, "-m", "coexec.executors.background", str(file)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )

    assert done.returncode not in (0, background.UNSUPPORTED)


def test_a_compilation_that_is_not_needed_any_more_ends():
    compilation = Compilation([doubled()])
    process = compilation._process
    assert not compilation.is_done()

    compilation.stop()

    assert process.returncode == -9


def test_programs_that_are_forgotten_take_their_compilations_with_them():
    s = make()
    for _ in range(5):
        step(s, coexec.GradientTape(executor="inductor"))
    [report] = coexec.explain().programs
    assert report.compiling == 2  # the iteration, and its commit
    del report
    from coexec.programs import all_states

    [state] = all_states()
    process = state._compilation._process
    del state

    coexec.reset()

    process.wait(30)
    assert process.returncode == -9
