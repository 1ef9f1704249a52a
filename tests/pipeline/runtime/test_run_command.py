from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.cli.job_arguments import SCHEDULES
from pipeline.errors import PlanError
from pipeline.plans import Plan, Predicted, Stage, read_plan, write_plan
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
def test_without_a_reference_the_losses_of_the_pipeline_are_printed(capsys):
    arguments = ["run", "charlm", "--stages", "2", *SMALL]
    status, text, _ = run(capsys, *arguments, "--no-reference")
    assert status == 0
    assert "not compared with one process" in text
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert len(steps) == 2
    assert steps == [line for line in run(capsys, *arguments)[1].splitlines() if line.startswith("step")]


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


@pytest.fixture
def planned(tmp_path, capsys) -> Callable[..., str]:
    """Plans the small model as options say; gives the file."""

    def plan(*options: str) -> str:
        profile, out = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
        assert run(capsys, "profile", "charlm", *SMALL[2:], "--samples", "3", "--out", profile)[0] == 0
        machines = ["--machines", "2", "--bandwidth", "1e12"]
        status, _, errors = run(capsys, "plan", "--profile", profile, *machines, *options, "--out", out)
        assert status == 0, errors
        return out

    return plan


def test_a_profiled_model_is_run_as_planned(planned, capsys):
    path = planned("--straight", "--cost-model", "original")
    plan = read_plan(path)
    assert (len(plan.stages), plan.stages[0].micro_batch, plan.schedule) == (2, 3, "pipedream")
    status, text, errors = run(capsys, "run", "charlm", "--plan", path, *SMALL)
    assert status == 0, errors
    assert f"all {2 * plan.micro_batches}, bit for bit" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"schedule": "gpipe", "weight_mode": "flush"}, "all 24, bit for bit"),
        ({"weight_mode": "vertical-sync"}, "all 24, bit for bit"),
        ({"recompute": ("stage", "none"), "schedule": "1f1b", "weight_mode": "flush"}, "all 24, bit for bit"),
        ({"schedule": "2bw", "weight_mode": "2bw"}, "all 24, bit for bit"),
        ({"replicas": (2, 1)}, "equal the single-process run"),
        ({"micro_batch": (2, 4), "schedule": "1f1b", "weight_mode": "flush"}, "equal the single-process run"),
    ],
    ids=str,
)
def test_what_a_plan_says_is_what_is_run(change, verdict, tmp_path, capsys):
    of_stages = {
        name: change.pop(name) for name in ("recompute", "replicas", "micro_batch") if name in change
    }
    stages = [
        Stage(tuple(map(str, nodes)), **{name: values[s] for name, values in of_stages.items()})
        for s, nodes in enumerate((range(3), range(3, 8)))
    ]
    plan = Plan(
        "charlm", "hand", "none", tuple(stages), ((0, 1),), "pipedream", "stashing", 12, 2,
        Predicted(0.0, "batch"),
    )  # fmt: skip
    path = tmp_path / "plan.json"
    write_plan(replace(plan, **change), path)
    status, text, errors = run(capsys, "run", "charlm", "--plan", str(path), *SMALL)
    assert status == 0, errors
    assert verdict in text


@pytest.mark.slow
def test_plans_are_compared(planned, capsys, tmp_path):
    straight = tmp_path / "straight.json"
    straight.write_text(Path(planned("--straight", "--cost-model", "original")).read_text())
    replicated = planned()
    out = tmp_path / "out.json"
    plans = f"{straight},{replicated}"
    status, _, errors = run(capsys, "compare", "charlm", "--plans", plans, *SMALL, "--out", str(out))
    assert status == 0, errors
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == plans.split(",")


def fitting(**change) -> Plan:
    """A plan of 8 layers on 2 stages."""
    stages = tuple(Stage(tuple(map(str, nodes))) for nodes in (range(3), range(3, 8)))
    plan = Plan(
        "m", "hand", "none", stages, ((0, 1),), "1f1b", "flush", 4, 2, Predicted(0.0, "batch")
    )  # fmt: skip
    first = {k: change.pop(k) for k in ("nodes", "tensor_parallel", "recompute", "replicas") if k in change}
    return replace(plan, stages=(replace(stages[0], **first), stages[1]), **change)


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (fitting(nodes=("0",)), [], "deals out 6 nodes of m, and charlm has 8 layers"),
        (fitting(tensor_parallel=2), [], "stage 0 is split over 2 devices"),
        (fitting(recompute="attention"), [], "stage 0 recomputes 'attention', which is inside its layers"),
        (fitting(edges=()), [], "runs as a chain of stages"),
        (fitting(replicas=200, micro_batches=200), [], "201 processes are needed"),
        (fitting(), ["--stages", "2"], "leave out --stages"),
        (fitting(), ["--schedule", "gpipe", "--samples", "1"], "leave out --schedule, --samples"),
        (fitting(), ["--set", "blocks=2"], "charlm has 4 layers"),
        (fitting(), ["--steps", "0"], "--steps 0: at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_does_not_fit_the_model_is_an_error_that_says_why(
    plan, options, message, tmp_path, capsys
):
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    status, _, errors = run(capsys, "run", "charlm", "--plan", str(path), *options)
    assert status == 2
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan", "nowhere.json"], "cannot read the plan nowhere.json"),
        (["--stages", "0"], "--stages 0: at least 1"),
        (["--stages", "100", "--set", "blocks=98"], "100 processes are needed"),
        (["--chunks", "2"], "--chunks goes with an interleaved schedule"),
        (["--set", "blocks"], "give NAME=VALUE"),
        (["--every", "0"], "--every 0"),
    ],
)
def test_options_that_make_no_sense_are_errors_in_one_line(options, message, capsys):
    status, _, errors = run(capsys, "run", "charlm", *options)
    assert status == 2
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_a_pipeline_of_one_stage_trains(capsys):
    status, text, errors = run(capsys, "run", "charlm", "--stages", "1", *SMALL)
    assert status == 0, errors
    assert "all 16, bit for bit" in text


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
