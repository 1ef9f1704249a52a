import json
import math

import pytest
import torch

from bench.cli import main
from bench.program import missing_packages
from bench.programs import PROGRAMS
from bench.speed.contenders import SPEED_MODES, Contender, Setup, compile_options, contenders, start
from bench.speed.rounds import Plan, measure, round_steps
from bench.speed.summary import conclusions, detail_rows, speed, speed_rows
from bench.speed.worker import Steps, Worker, WorkerError

TINY = Setup("tiny", seed=0, threads=1)


def result(program, mode, round_ms, executor=None, **more):
    fields = {
        "program": program,
        "mode": mode,
        "executor": executor,
        "round_ms": round_ms,
        "error": None,
        "first_call_s": 1.0,
        "peak_rss_mb": 100.0,
        "traces": None,
        "fallbacks": None,
        "coexec_share": None,
    }
    if mode.startswith("compile"):
        fields |= {"graph_breaks": 0, "recompilations": 0}
    return fields | more


RESULTS = [
    result("a", "eager", [8.0, 10.0, 90.0]),
    result("a", "coexec", [4.0, 5.0, 6.0], "aten", python_ms=2.0, peak_rss_mb=110.0),
    result("a", "coexec", [2.0, 2.5, 3.0], "inductor", python_ms=1.0),
    result("a", "lazy", [5.0], "aten", python_ms=2.0),
    result("a", "compile:default", [5.0]),
    result("a", "compile:max-autotune", [], error="RuntimeError: no"),
    result("b", "eager", [10.0]),
    result("b", "coexec", [10.0], "aten", python_ms=5.0),
    result("b", "compile:default", [20.0], graph_breaks=2),
]


def test_each_mode_with_a_graph_runs_with_each_executor_and_the_dearest_to_compile_comes_last():
    entered = contenders("mlp", SPEED_MODES, ("aten", "inductor"))

    assert [c.title for c in entered] == [
        "eager",
        "coexec (aten)",
        "coexec:asynchronous (aten)",
        "lazy (aten)",
        "coexec (inductor)",
        "coexec:asynchronous (inductor)",
        "lazy (inductor)",
        "compile:default",
        "compile:max-autotune",
    ]


def test_a_speed_is_the_ratio_of_the_medians():
    assert speed(RESULTS[1], RESULTS[0]) == 2
    assert speed(RESULTS[2], RESULTS[0]) == 4


def test_the_table_has_each_program_each_mode_and_their_geometric_means():
    head, rows = speed_rows(RESULTS)

    assert head[2:] == [
        "coexec (aten)",
        "coexec (inductor)",
        "lazy (aten)",
        "compile:default",
        "compile:max-autotune",
    ]
    assert [row[0] for row in rows] == ["a", "b", "**geometric mean**"]
    assert [cell.split(" ")[0] for cell in rows[0][1:]] == ["10.00", "2.00", "4.00", "2.00", "2.00", "fails"]
    assert [cell.split(" ")[0] for cell in rows[1][1:]] == ["10.00", "1.00", "", "", "0.50", ""]
    assert rows[2][2:] == [
        f"**{math.sqrt(2):.2f}** of 2",
        "**4.00** of 1",
        "**2.00** of 1",
        "**1.00** of 2",
        "",
    ]


def test_the_fastest_executor_is_compared_with_the_fastest_peer_programs_with_graph_breaks_apart():
    assert conclusions(RESULTS) == [
        "coexec over eager (the fastest of each): geometric mean 2.00 of 2 programs, least 1.00 (b)",
        "coexec over torch.compile, without graph breaks and recompilations (the fastest of each):"
        " geometric mean 2.00 of 1 programs, least 2.00 (a)",
        "coexec over torch.compile, with graph breaks or recompilations (the fastest of each):"
        " geometric mean 2.00 of 1 programs, least 2.00 (b)",
        "coexec over lazy (the fastest of each): geometric mean 2.00 of 1 programs, least 2.00 (a)",
        "PythonRunner's own time: median 0.30 of eager's step, at most 0.50 (b)",
    ]


def test_the_details_have_memory_and_python_as_shares_of_eagers():
    rows = {(row[0], row[1]): row for row in detail_rows(RESULTS)}

    assert rows["a", "coexec (aten)"][5] == "1.10"
    assert rows["a", "coexec (aten)"][12] == "0.20"
    assert rows["b", "compile:default"][6] == "2"
    assert rows["a", "compile:max-autotune"][2] == "fails"


def test_of_results_without_eager_nothing_is_concluded():
    assert conclusions([result("a", "coexec", [1.0], "aten")]) == []
    assert speed_rows([result("a", "coexec", [1.0], "aten")])[1][0][1] == "fails"


@pytest.mark.parametrize(
    ("step_ms", "steps"),
    [((900.0, 2.0, 2.0, 2.0), 125), ((900.0, 20.0, 20.0, 20.0), 13), ((900.0, 50.0, 50.0, 50.0), 10)],
)
def test_rounds_have_as_many_steps_as_eager_needs_for_their_time_but_never_too_few(step_ms, steps):
    assert round_steps(Plan(4, 10, 3, round_s=0.25), [Steps(step_ms, 0.0)]) == steps
    assert round_steps(Plan(4, 10, 3), [Steps(step_ms, 0.0)]) == 10
    assert round_steps(Plan(4, 10, 3, round_s=0.25), []) == 10


def test_what_fails_is_a_result_with_its_error():
    ticks = []

    [failed] = measure(
        [Contender("no such program", "eager", None)], TINY, Plan(1, 1, 2), seconds=60, tick=ticks.append
    )

    assert failed.error == "KeyError: 'no such program'"
    assert failed.step_ms == ()
    assert ticks == ["no such program eager", "no such program round 1", "no such program round 2"]


def test_a_contender_that_takes_too_long_is_ended():
    worker = Worker(Contender("mlp", "eager", None), TINY)

    with pytest.raises(WorkerError, match="not done after 1 s"):
        worker.take(10**7, measured=False, timeout_s=1)


def test_compiled_random_numbers_are_eagers_on_a_cpu_and_the_compilers_own_on_a_gpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    assert compile_options("compile:default", cpu) == {"options": {"fallback_random": True}}
    assert compile_options("compile:default", gpu) == {}
    assert compile_options("compile:max-autotune", cpu)["options"]["max_autotune"]


@pytest.mark.slow
def test_the_graph_breaks_of_an_optimizer_are_counted_apart():
    worker = Worker(Contender("mlp", "compile:default", None), TINY)
    worker.take(3, measured=False)
    worker.take(2, measured=True)

    facts = worker.facts()

    assert facts["graph_breaks"] == 0
    assert facts["optimizer_graph_breaks"] > 0


def test_amp_computes_in_bfloat16_and_returns_float32():
    run = start(Contender("digits", "eager", None), Setup("tiny", 0, 1, amp=True, channels_last=True))
    model = run.training.model
    seen = []
    model.conv2.register_forward_hook(lambda module, args, output: seen.append(output))

    logits = model(run.training.train_images[:4])

    assert seen[0].dtype is torch.bfloat16
    assert logits.dtype is torch.float32
    assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--programs", "digit"], "'digit' is not a program; choose from digits,"),
        (
            ["--modes", "compile"],
            "'compile' is not a mode; choose from eager,coexec,coexec:asynchronous,",
        ),
        (["--executors", "tvm"], "'tvm' is not an executor; choose from aten,inductor"),
        (["--budget", "0"], "'0' is not a whole number of at least 1"),
    ],
    ids=" ".join,
)
def test_bad_input_is_refused_with_a_reason(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["speed", *arguments])

    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_programs_take_turns_and_the_report_is_made_of_the_record(tmp_path, capsys):
    out = tmp_path / "speed.json"
    some = ["--programs", "mlp", "--preset", "tiny", "--modes", "coexec", "--executors", "aten"]

    status = main(
        [
            "speed",
            *some,
            "--rounds",
            "2",
            "--round-seconds",
            "0",
            "--warmup",
            "6",  # none runs eagerly yet, to see whether that is faster
            "--threads",
            "1",
            "--out",
            str(out),
        ]
    )

    assert status == 0
    written = json.loads(out.read_text())
    eager, coexec = written["results"]
    assert (eager["mode"], coexec["mode"], coexec["executor"]) == ("eager", "coexec", "aten")
    for one in (eager, coexec):
        assert len(one["round_ms"]) == 2
        assert len(one["step_ms"]) == 6 + 2 * 10
        assert (one["warmup_steps"], one["preset"], one["device"]) == (6, "tiny", "cpu")
        assert one["first_call_s"] == pytest.approx(one["step_ms"][0] / 1e3)
        assert 0 < one["base_rss_mb"] <= one["peak_rss_mb"]
        assert one["losses"]
    assert coexec["losses"] == eager["losses"]
    assert (eager["graph_breaks"], eager["recompilations"]) == (0, 0)
    assert coexec["phases"] == {"co-execution": 20}
    assert coexec["coexec_share"] == 1
    assert coexec["python_ms"] > 0
    assert "PythonRunner's own time" in capsys.readouterr().out

    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| program | eager ms | coexec (aten) |"
    assert lines[3].startswith("| **geometric mean** |")
    assert lines[-1].startswith("- `python -m bench speed --programs mlp")


def test_the_newest_record_of_a_program_counts(tmp_path, capsys):
    for day, ms in ((1, 10.0), (3, 20.0), (2, 40.0)):
        environment = {
            "date": f"2026-01-0{day}",
            "cpu": "",
            "threads": 1,
            "cores": 2,
            "torch": "",
            "python": "",
        }
        rows = [result("a", "eager", [ms]), result("a", "coexec", [10.0], "aten", python_ms=1.0)]
        record = {
            "command": f"python -m bench speed --seed {day}",
            "environment": environment,
            "results": rows,
        }
        (tmp_path / f"{day}.json").write_text(json.dumps(record))

    assert main(["report", "--of", "speed", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| a | 20.00 [20.00, 20.00] | 2.00 [2.00, 2.00] |" in text
    assert "--seed 3" in text
    assert "--seed 1" not in text


def test_all_programs_whose_packages_are_there_run_by_default():
    from bench.cli import parser

    options = parser().parse_args(["speed"])

    assert options.programs == tuple(n for n, p in PROGRAMS.items() if not missing_packages(p))
    assert options.modes == SPEED_MODES
