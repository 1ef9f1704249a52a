import json
import subprocess
import sys

import pytest

from bench.cli import COMMANDS, main
from bench.commands import overlap
from bench.programs import PROGRAMS
from bench.records import Result, record

REQUIRED = {
    "program",
    "mode",
    "executor",
    "step_ms",
    "first_call_s",
    "equal",
    "max_abs_diff",
    "traces",
    "fallbacks",
    "coexec_share",
    "peak_rss_mb",
    "error",
}


def read_record(path):
    written = json.loads(path.read_text())
    assert written.keys() == {"command", "environment", "results"}
    assert written["environment"].keys() >= {"torch", "python", "cpu", "threads", "load", "commit", "date"}
    for result in written["results"]:
        assert result.keys() >= REQUIRED
    return written


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_that_states_its_defaults(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])

    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert COMMANDS[command].__doc__.splitlines()[0] in text
    if "--steps" in text:
        assert "training steps" in text
        assert "(default: " in text


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "list"],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )

    assert [line.split()[0] for line in done.stdout.splitlines()] == ["program", *PROGRAMS]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digit"], "invalid choice: 'digit'"),
        (["train", "digits", "--mode", "jit"], "invalid choice: 'jit'"),
        (["train", "digits", "--steps", "0"], "'0' is not a whole number of at least 1"),
        (["train", "digits", "--steps", "ten"], "'ten' is not a whole number of at least 1"),
        (
            ["compare", "digits", "--modes", "eager,jit"],
            "'jit' is not a mode; choose from eager,compile,coexec,lazy",
        ),
        (["compare", "digits", "--executor", "tvm"], "invalid choice: 'tvm'"),
        ([], "the following arguments are required: COMMAND"),
    ],
    ids=" ".join,
)
def test_bad_input_is_refused_with_a_reason(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)

    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_train_writes_every_step_and_the_metric_of_each_epoch(tmp_path, capsys):
    out = tmp_path / "new folder" / "train.json"

    status = main(
        [
            "train",
            "digits",
            "--mode",
            "eager",
            "--preset",
            "tiny",
            "--steps",
            "50",
            "--threads",
            "1",
            "--out",
            str(out),
        ]
    )

    assert status == 0
    written = read_record(out)
    [result] = written["results"]
    assert written["command"].startswith("python -m bench train digits --mode eager")
    assert written["environment"]["threads"] == 1
    assert len(result["step_ms"]) == 50
    assert result["first_call_s"] == pytest.approx(result["step_ms"][0] / 1e3)
    assert [step for step, _ in result["metrics"]] == [44]
    assert result["equal"] is None
    assert "test accuracy" in capsys.readouterr().out


def test_compare_holds_every_sample_and_states_its_tolerance(tmp_path, capsys):
    out = tmp_path / "compare.json"

    status = main(
        ["compare", "digits", "--modes", "compile", "--preset", "tiny", "--steps", "6", "--out", str(out)]
    )

    assert status == 0
    eager, compiled = read_record(out)["results"]
    assert (eager["mode"], eager["equal"], eager["max_abs_diff"], eager["tolerance"]) == (
        "eager",
        True,
        0.0,
        None,
    )
    assert (compiled["mode"], compiled["equal"], compiled["tolerance"]) == ("compile", True, 1e-3)
    assert len(eager["step_ms"]) == len(compiled["step_ms"]) == len(eager["losses"]) == 6
    assert "within 0.001" in capsys.readouterr().out


def test_a_mode_that_fails_has_its_error_in_its_record_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def fail(training):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr("bench.modes._compile", fail)
    out = tmp_path / "compare.json"

    status = main(
        ["compare", "charlm", "--modes", "compile", "--preset", "tiny", "--steps", "3", "--out", str(out)]
    )

    assert status == 1
    eager, compiled = read_record(out)["results"]
    assert eager["error"] is None
    assert len(eager["step_ms"]) == 3
    assert compiled["error"] == "RuntimeError: no compiler\nhere"
    assert compiled["equal"] is False
    assert "RuntimeError: no compiler" in capsys.readouterr().out


def test_what_is_not_a_finite_number_is_null_in_a_record():
    result = Result("digits", "eager", max_abs_diff=float("inf"), details={"losses": [1.0, float("nan")]})

    [written] = record([], [result])["results"]

    assert written["max_abs_diff"] is None
    assert written["losses"] == [1.0, None]


def test_report_makes_a_table_of_the_newest_records(tmp_path, capsys):
    out = tmp_path / "digits.json"
    main(["compare", "digits", "--modes", "eager", "--preset", "tiny", "--steps", "3", "--out", str(out)])
    capsys.readouterr()

    status = main(["report", str(tmp_path)])

    assert status == 0
    head, rule, row, _, source = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| digits | eager | ")
    assert "python -m bench compare digits" in source


def test_report_says_how_to_make_records_when_there_are_none(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "python -m bench compare PROGRAM --out FILE.json" in capsys.readouterr().out


class SleepingReplay:
    """A graph that takes 3 ms and no processor."""

    def start(self):
        pass

    def wait(self):
        return 3.0


def test_overlap_of_a_graph_that_needs_nothing_costs_nothing():
    measured = overlap.measure(SleepingReplay(), rounds=5)

    assert len(measured.loop_alone_per_ms) == len(measured.graph_beside_ms) == 5
    assert measured.graph_ratio.median == 1
    assert measured.loop_ratio.median == pytest.approx(1, rel=0.5)
