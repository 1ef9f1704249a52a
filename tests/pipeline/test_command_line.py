from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import COMMANDS, main
from pipeline.compile import compile_plan
from pipeline.plans import plan_from_json, read_plan, write_plan
from pipeline.program import parse_program
from pipeline.torch_text import to_torch

DATA = Path(__file__).parent / "data"
PROFILES = str(DATA / "profiles.json")
VGG = ["--profile", PROFILES, "--model", "vgg16"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def plan_file(tmp_path, capsys) -> str:
    path = str(tmp_path / "plan.json")
    status, _, _ = run(capsys, "plan", *VGG, "--machines", "4", "--bandwidth", "1.25e9", "--out", path)
    assert status == 0
    return path


def test_the_module_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "--help"], capture_output=True, text=True, check=True
    )
    assert "python -m pipeline plan" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert COMMANDS[command].__doc__.splitlines()[0] in text
    assert "FILE" in text


@pytest.mark.parametrize(
    ("entry", "extra"),
    [
        *((e, ["paper"]) for e in json.loads((DATA / "paper_recurrence_examples.json").read_text())),
        *(
            (e, ["original", *(["--straight"] if e["straight"] else [])])
            for e in json.loads((DATA / "original_optimizer_examples.json").read_text())
            if e["activation_compression_ratio"] is None
        ),
    ],
)
def test_plans_of_both_cost_models_have_the_reference_times(entry, extra, capsys):
    machines = entry.get("machines") or entry["all_num_machines"]
    bandwidths = entry.get("bandwidths") or entry["network_bandwidths"]
    status, out, _ = run(
        capsys,
        "plan",
        *VGG,
        "--machines",
        ",".join(map(str, machines)),
        "--bandwidth",
        ",".join(map(str, bandwidths)),
        "--planner",
        "pipedream",
        "--cost-model",
        *extra,
    )
    assert status == 0
    expected = entry.get("time_s") or entry["pipeline_time_s"]
    assert json.loads(out)["predicted"]["time_s"] == pytest.approx(expected, rel=1e-9)


def test_a_plan_goes_through_validation_and_simulation(plan_file, tmp_path, capsys):
    program = tmp_path / "program.txt"
    status, out, _ = run(capsys, "validate", plan_file, "--out", str(program))
    assert (status, out.split(":")[0]) == (0, "valid")
    assert str(parse_program(program.read_text())) == program.read_text()
    status, out, _ = run(capsys, "simulate", plan_file, "--machines", "4", "--bandwidth", "1e15")
    assert status == 0
    free = json.loads(out)
    machines = ["--machines", "4", "--bandwidth", "1e15", "--memory"]
    for memory, fits in (("1e12", True), ("1e6", False)):
        _, out, _ = run(capsys, "simulate", plan_file, *machines, memory)
        assert json.loads(out)["fits_into_memory"] is fits
    status, out, _ = run(capsys, "simulate", str(program), "--plan", plan_file)
    assert status == 0
    assert json.loads(out)["makespan_s"] == pytest.approx(free["makespan_s"], rel=1e-4)


def test_simulation_writes_result_trace_and_picture(plan_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("result.json", "trace.json", "schedule.png")}
    arguments = ["--out", "result.json", "--trace", "trace.json", "--picture", "schedule.png"]
    arguments = [str(files.get(a, a)) for a in arguments]
    status, out, _ = run(capsys, "simulate", plan_file, *arguments)
    assert (status, out) == (0, "")
    result = json.loads(files["result.json"].read_text())
    assert result["makespan_s"] > 0
    assert sum(result["critical_path_s"].values()) == pytest.approx(result["makespan_s"])
    assert json.loads(files["trace.json"].read_text())["traceEvents"]
    assert files["schedule.png"].read_bytes().startswith(b"\x89PNG")


def test_an_invalid_program_is_reported_line_by_line(plan_file, tmp_path, capsys):
    program = tmp_path / "program.txt"
    run(capsys, "validate", plan_file, "--out", str(program))
    lines = program.read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("  SEND"))
    program.write_text("".join(lines[:first] + lines[first + 1 :]))
    status, out, _ = run(capsys, "validate", str(program))
    assert status == 1
    assert "never starts SEND" in out
    assert out.startswith("rank ")
    status, _, err = run(capsys, "simulate", str(program))
    assert status == 2
    assert "error: the program is not valid" in err


def test_a_plan_that_torch_can_express_is_written_for_it(plan_file, tmp_path, capsys):
    out = str(tmp_path / "schedule.csv")
    status, _, err = run(capsys, "validate", plan_file, "--torch", out)
    assert status == 2
    assert "error: torch" in err  # it knows no schedule without a flush
    flushing = read_plan(plan_file)
    stages = tuple(replace(stage, replicas=1, devices=()) for stage in flushing.stages)
    flushing = replace(flushing, schedule="1f1b", weight_mode="flush", stages=stages)
    write_plan(flushing, plan_file)
    assert run(capsys, "validate", plan_file, "--torch", out)[0] == 0
    rows = [line.split(",") for line in Path(out).read_text().splitlines()]
    assert rows == to_torch(compile_plan(flushing))


def test_a_memory_bound_is_checked(plan_file, capsys):
    assert run(capsys, "validate", plan_file, "--memory", "1e12")[0] == 0
    status, out, _ = run(capsys, "validate", plan_file, "--memory", "1e6")
    assert status == 1
    assert "may hold 1000000" in out


def test_the_other_planners_plan_too(tmp_path, capsys):
    machines = ["--machines", "8,4", "--bandwidth", "300e9,25e9", "--memory", "80e9"]
    status, out, err = run(
        capsys,
        "plan",
        "--planner",
        "ptdp",
        "--transformer",
        "gpt3-13b",
        "--batch",
        "32",
        "--bpipe",
        *machines,
    )
    assert status == 0
    assert plan_from_json(json.loads(out)).planner == "ptdp"
    assert "s per batch" in err
    profile = tmp_path / "blocks.json"
    node = {"desc": "", "fwd_ms": 1, "bwd_ms": 2, "act_bytes": 1e6, "param_bytes": 1e7}
    nodes = [node | {"id": str(i)} for i in range(8)]
    profile.write_text(
        json.dumps({"blocks": {"nodes": nodes, "edges": [[str(i), str(i + 1)] for i in range(7)]}})
    )
    status, out, _ = run(
        capsys, "plan", "--planner", "2bw", "--profile", str(profile), "--batch", "32", *machines
    )
    assert status == 0
    assert plan_from_json(json.loads(out)).planner == "2bw"


MACHINES = ["--machines", "4", "--bandwidth", "1e9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", *MACHINES], "of which model? Give --profile"),
        (["plan", *VGG], "on which machines?"),
        (["plan", *VGG, "--machines", "4,2", "--bandwidth", "1e9"], "go together"),
        (["plan", *VGG, *MACHINES, "--latency", "0,0"], "--latency has 2 numbers for 1 levels"),
        (["plan", *VGG, *MACHINES, "--topology", "t.json"], "--topology says it all"),
        (["plan", *VGG, "--topology", "nowhere.json"], "cannot read the topology nowhere.json"),
        (["plan", "--profile", PROFILES, *MACHINES], "no model was named"),
        (["plan", "--profile", "nowhere.json", *MACHINES], "cannot read the profile nowhere.json"),
        (["plan", *VGG, *MACHINES, "--cost-model", "magic"], "one of paper, original"),
        (["plan", *VGG, *MACHINES, "--chunks", "2"], "--chunks is an option of the planner ptdp"),
        (
            ["plan", *VGG, *MACHINES, "--shard-optimizer"],
            "--shard-optimizer is an option of the planner ptdp",
        ),
        (
            [
                *["plan", *MACHINES, "--planner", "ptdp", "--batch", "8", "--transformer", "gpt3-13b"],
                *["--shard-optimizer", "--state-bytes", "8"],
            ],
            "weight and sharded optimizer need 14",
        ),
        (["plan", *VGG, *MACHINES, "--planner", "2bw"], "needs --batch"),
        (["plan", *VGG, *MACHINES, "--planner", "2bw", "--batch", "8"], "no chain of blocks"),
        (["plan", *MACHINES, "--planner", "ptdp", "--batch", "8"], "needs --transformer"),
        (
            ["plan", *MACHINES, "--planner", "ptdp", "--batch", "8", "--transformer", "x"],
            "layers,hidden,heads",
        ),
        (["plan", *VGG, "--machines", "0", "--bandwidth", "1e9"], "at least 1"),
        (["simulate", PROFILES, "--memory", "1e9"], "give --machines and --bandwidth too"),
        (["validate", "nowhere.json"], "cannot read nowhere.json"),
        (["simulate", PROFILES], "the plan lacks the key"),
    ],
)
def test_bad_input_is_an_error_in_one_line(arguments, message, capsys):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--machines", "four"], ["plan", "--planner", "magic"], ["simulate"], ["compute"], []],
)
def test_bad_options_are_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: python -m pipeline" in capsys.readouterr().err


def test_a_plan_that_needs_more_devices_than_there_are_is_an_error(plan_file, tmp_path, capsys):
    status, _, err = run(capsys, "simulate", plan_file, "--machines", "2", "--bandwidth", "1e9")
    assert status == 2
    assert "the plan uses device 3; there are 2" in err
    broken = tmp_path / "broken.json"
    write_plan(read_plan(plan_file), broken)
    broken.write_text(broken.read_text().replace('"schedule": "pipedream"', '"schedule": "magic"'))
    status, _, err = run(capsys, "validate", str(broken))
    assert status == 2
    assert "schedule is 'magic'" in err
