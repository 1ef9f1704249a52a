from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.cli.job_arguments import SCHEDULES
from pipeline.errors import PlanError
from pipeline.runtime.progress import Progress, read_progress
from pipeline.trainable import cut, even_lengths, make_trainable

SMALL = ["--steps", "2", "--set", "width=16", "--set", "context=8"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_training_in_a_pipeline_prints_that_losses_equal_one_process(capsys, tmp_path):
    out = str(tmp_path / "out.json")
    status, text, errors = run(
        capsys, "run", "charlm", "--stages", "4", "--schedule", "bpipe", *SMALL, "--out", out
    )
    assert status == 0, errors
    assert "losses equal the single-process run: all 16, bit for bit." in text
    assert json.loads(Path(out).read_text())["difference"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "bpipe"])
def test_every_schedule_can_be_run(schedule, capsys):
    blocks = "6" if schedule in ("interleaved", "bpipe-interleaved", "zbv") else "4"
    arguments = ["run", "charlm", "--schedule", schedule, "--set", f"blocks={blocks}", *SMALL]
    status, text, errors = run(capsys, *arguments)
    assert status == 0, errors
    assert "bit for bit" in text


@pytest.mark.slow
def test_replicas_and_recomputation_can_be_run(capsys):
    arguments = ["run", "charlm", "--stages", "2", "--replicas", "2", "--recompute", *SMALL]
    status, text, errors = run(capsys, *arguments)
    assert status == 0, errors
    assert "up to rounding" in text or "bit for bit" in text


@pytest.mark.slow
def test_a_job_goes_on_from_its_checkpoints(capsys, tmp_path):
    arguments = ["run", "charlm", "--stages", "2", *SMALL[2:], "--checkpoints", str(tmp_path)]
    assert run(capsys, *arguments, "--steps", "2")[0] == 0
    status, text, _ = run(capsys, *arguments, "--steps", "4")
    assert status == 0
    assert "all 16, bit for bit" in text  # of the two steps that were left


@pytest.mark.slow
def test_schedules_are_compared(capsys, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--schedules", "gpipe,1f1b", "--stages", "2", "--steps", "3", "--set", "forward_ms=5"]
    status, text, errors = run(capsys, "compare", "sleep", *arguments, "--out", str(out))
    assert status == 0, errors
    rows = json.loads(out.read_text())["rows"]
    assert [row["job"]["schedule"] for row in rows] == ["gpipe", "1f1b"]
    assert all(len(row["samples_s"]) == 2 for row in rows)
    assert [row["held_bytes"] for row in rows] == [row["predicted_bytes"] for row in rows]
    assert "predicted" in text


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """A long job in the background; the files of its ranks are below `tmp_path`."""
    command = [sys.executable, "-m", "pipeline", "run", "charlm", "--steps", "100000", "--no-reference"]
    return subprocess.Popen(
        [*command, "--limit", "20", *SMALL[2:]],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_at_work(tmp_path: Path) -> list[int]:
    """Process ids of the ranks once all of them train."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        files = sorted(tmp_path.glob("pipeline-*/rank-*.progress"))
        if len(files) == 4 and all(read_progress(f)[0] > 2 for f in files):
            return [int(f.with_suffix(".pid").read_text()) for f in files]
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether a process ends within a time; one that is only waited for has ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_an_error_that_names_it_and_leaves_no_process(tmp_path):
    job = start(tmp_path)
    pids = ranks_at_work(tmp_path)
    os.kill(pids[2], signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "rank 2 ended without a word in run" in errors
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the command", "torchrun"])
def test_killing_what_started_the_ranks_leaves_no_process(victim, tmp_path):
    job = start(tmp_path)
    pids = ranks_at_work(tmp_path)
    torchrun = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(job.pid if victim == "the command" else torchrun, signal.SIGKILL)
    if victim == "the command":
        job.wait()  # one that has ended but is not waited for still counts as there
    try:
        assert all(gone(pid) for pid in (*pids, torchrun))
    finally:
        job.communicate(timeout=60)


def test_the_progress_of_a_rank_can_be_read_from_outside(tmp_path):
    path = tmp_path / "progress"
    assert read_progress(path) == (0, -1)
    progress = Progress(path)
    assert read_progress(path) == (0, -1)
    for index in (0, 1, 2, 0, 1):
        progress(index, None)
    assert read_progress(path) == (1, 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "give package.module:function, or one of charlm"),
        ("no.such:thing", {}, "can't be loaded"),
        ("pipeline.charlm:missing", {}, "can't be loaded"),
        ("charlm", {"colour": 1}, "it takes"),
        ("builtins:dict", {"a": 1}, "no function with a signature"),
        ("builtins:globals", {}, "gave a dict"),
    ],
)
def test_a_model_that_is_not_there_is_an_error_that_says_what_to_give(name, options, message):
    with pytest.raises(PlanError, match=message):
        make_trainable(name, 0, **options)


def test_layers_are_dealt_out_evenly_and_more_to_the_middle():
    assert even_lengths(8, 4) == (2, 2, 2, 2)
    assert even_lengths(6, 4) == (1, 2, 2, 1)
    with pytest.raises(PlanError, match="3 layers can't be cut into 4 stages"):
        even_lengths(3, 4)


def test_stages_must_take_all_layers():
    with pytest.raises(PlanError, match="4 layers can't be cut into stages of"):
        cut(make_trainable("sleep", 0), (1, 2))
