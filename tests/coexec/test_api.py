"""The public surface: names, options, errors, explain, draw."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import coexec
from coexec.reasons import REASONS, cause
from tests.coexec.harness import compare, linear, native, nothing, train


def test_the_public_names():
    assert sorted(coexec.__all__) == [
        "CoexecError",
        "CommitError",
        "Explanation",
        "GradientTape",
        "OptionError",
        "Options",
        "ProgramReport",
        "TapeError",
        "VerificationError",
        "draw",
        "explain",
        "options",
        "reset",
    ]
    assert all(hasattr(coexec, name) for name in coexec.__all__)


def test_the_tape_takes_keyword_arguments_only():
    parameters = inspect.signature(coexec.GradientTape).parameters.values()

    assert [p.name for p in parameters] == ["key", "executor", "mode", "synchronous", "check"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in parameters)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"executor": "xla"}, r"executor='xla'; it can be 'aten' or 'inductor'"),
        ({"mode": "fast"}, r"mode='fast'; it can be 'coexec' or 'lazy' or 'eager'"),
        ({"synchronous": 1}, r"synchronous=1; it has to be a bool"),
        ({"check": "yes"}, r"check='yes'; it has to be a bool"),
    ],
)
def test_a_bad_option_is_an_error_that_says_what_it_can_be(option, message):
    with pytest.raises(coexec.OptionError, match=message):
        coexec.GradientTape(**option)
    with pytest.raises(ValueError, match=message):
        coexec.Options(**option)


@pytest.mark.parametrize("value", [1, True, "many", 2.5])
def test_the_number_of_traces_is_an_integer_above_one(value):
    with pytest.raises(coexec.OptionError, match="max_traces="):
        coexec.Options(max_traces=value)


def test_an_unknown_option_is_an_error_that_lists_the_options():
    with pytest.raises(coexec.OptionError, match="no option 'exectuor'; the options are executor, mode"):
        coexec.options.exectuor = "aten"


def test_options_are_defaults_of_every_tape(monkeypatch):
    monkeypatch.setattr(coexec.options, "mode", "eager")
    with coexec.GradientTape():
        torch.ones(1) + 1

    assert coexec.explain().programs == ()


def test_replaced_options_leave_the_others_and_the_original_alone():
    options = coexec.Options(max_traces=9)

    assert options.replaced(mode="lazy", executor=None) == coexec.Options(mode="lazy", max_traces=9)
    assert options.mode == "coexec"


def test_errors_form_one_tree():
    for error in (coexec.OptionError, coexec.TapeError, coexec.VerificationError, coexec.CommitError):
        assert issubclass(error, coexec.CoexecError)
    assert issubclass(coexec.OptionError, ValueError)
    assert issubclass(coexec.TapeError, RuntimeError)
    assert issubclass(coexec.CommitError, RuntimeError)


def test_every_reason_has_an_id_a_title_and_a_hint():
    for id_, reason in REASONS.items():
        assert id_ == reason.id
        assert id_.startswith("CX0")
        assert reason.title
        assert reason.hint.endswith(".")
    assert str(cause("CX0001", "here", "a.py:1")) == "CX0001 new path: here (from a.py:1)"


def step(s, k, tape):
    x = torch.randn(5, 4)
    with tape():
        h = s.model(x)
        if k == 6:
            h = h * 2
        train(s, h.pow(2).mean())


def test_the_explanation_tells_what_happened():
    report = compare(linear, step, 12)
    text = str(coexec.explain())

    assert report.steps == {"tracing": 3, "co-execution": 8, "fallback": 1}
    assert report.traces == 4
    assert report.fallbacks == 1
    [fallback] = report.causes
    assert (fallback.iteration, fallback.id) == (7, "CX0001")
    assert fallback.where.startswith("test_api.py:")
    assert "Tensor.mul where the traces go on with Tensor.pow" in fallback.cause
    assert len(report.python_ms) == len(report.graph_ms) == len(report.python_stall_ms) == 8
    assert len(report.compile_s) == 2
    assert sum(b.operations for b in report.blocks) > 10
    assert report.switch_cases
    assert text.startswith(f"program {report.key}: co-execution phase\n")
    for part in (
        "iterations: 3 tracing",
        "1 x CX0001 new path",
        "blocks:",
        "TraceGraph:",
        "nn.linear(feed, c0, c1)",
    ):
        assert part in text
    assert coexec.explain().summary() in text or "TraceGraph" not in coexec.explain().summary()


def test_an_explanation_of_nothing_says_so():
    assert str(coexec.explain()) == "no tape has been used"


def test_reset_forgets_programs():
    compare(linear, step, 4)
    coexec.reset()

    assert coexec.explain().programs == ()


@native
def test_a_program_that_cannot_be_traced_runs_call_by_call_with_a_reason():
    def untraceable(s, k, tape):
        with tape():
            torch.randn(3).untyped_storage()

    report = compare(nothing, untraceable, 6)

    assert report.phase == "dynamic"
    assert report.dynamic_cause.startswith("CX0109")
    assert "Tensor.untyped_storage" in {name for name, _, _ in report.waits}


def test_without_the_native_core_new_paths_now_and_then_do_not_end_co_execution(monkeypatch):
    monkeypatch.setattr("coexec.program_state.core", None)

    def new_paths(s, k, tape):
        with tape():
            x = torch.ones(3) * 2
            for _ in range(max(0, k - 3) // 2):
                x = x + 1
        return x

    report = compare(nothing, new_paths, 14)

    assert report.fallbacks > 2
    assert report.phase == "co-execution"


def test_without_the_native_core_a_program_that_cannot_be_traced_is_left_alone(caplog, monkeypatch):
    monkeypatch.setattr("coexec.program_state.core", None)

    def untraceable(s, k, tape):
        with tape():
            torch.randn(3).untyped_storage()

    report = compare(nothing, untraceable, 6)

    assert report.phase == "eager"
    assert report.eager_cause.startswith("CX0109")
    assert "coexec leaves test_api.py" in caplog.text


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    report = compare(linear, step, 9)
    path = tmp_path / f"graph.{suffix}"

    assert coexec.draw(report, path) == str(path)
    assert coexec.draw(report.key, str(path)) == str(path)
    assert path.stat().st_size > 1000
    if suffix == "svg":
        assert "nn.linear" in path.read_text() or "<svg" in path.read_text()


def test_drawing_what_is_not_there_is_an_error(tmp_path):
    compare(linear, step, 3)
    with pytest.raises(coexec.OptionError, match=r"no program 'x'; there are 'test_api.py"):
        coexec.draw("x", tmp_path / "a.svg")
    with pytest.raises(coexec.OptionError, match=r"the suffix has to be .svg or .png"):
        coexec.draw(coexec.explain().programs[0], tmp_path / "a.pdf")


def test_a_program_without_a_graph_cannot_be_drawn(tmp_path):
    with coexec.GradientTape():
        torch.randn(3).untyped_storage()

    with pytest.raises(coexec.OptionError, match="no TraceGraph"):
        coexec.draw(coexec.explain().programs[0], tmp_path / "a.svg")


def test_importing_changes_nothing_of_the_process():
    code = """
import os, sys, threading, torch
def settings():
    return torch.get_num_threads(), sys.getswitchinterval(), dict(os.environ), torch.get_default_dtype()
before = settings()
import coexec
assert settings() == before
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
