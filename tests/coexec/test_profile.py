"""Profiles: both runners' execution and stalls as a timeline; and what the log says."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coexec
from coexec._native import core
from coexec.profile.profile import active_profile
from coexec.profile.timeline import OVERHEAD_S, SHORTEST_STALL_S, Span, clipped, lane
from coexec.profile.trace_events import trace_events
from coexec.runners.graph_runner import make_graph_runner
from tests.coexec.harness import compare, linear, train

records_spans = core is None or hasattr(core.Runner, "record_spans")
needs_spans = pytest.mark.skipif(not records_spans, reason="the native core was built before it kept spans")
needs_dynamic = pytest.mark.skipif(
    core is None or not records_spans, reason="the dynamic phase needs a native core that keeps spans"
)


def iterate(weight, steps, **options):
    for _ in range(steps):
        with coexec.GradientTape(**options):
            loss = (weight * 3).sum()
            if loss.item() > 1e9:
                break
            loss.backward()


def computing(weight, steps):
    """The graph takes longer than Python does until it looks at the result."""
    for _ in range(steps):
        with coexec.GradientTape():
            (weight @ weight @ weight).sum().item()


def slowly(weight, steps, **options):
    """Python does nothing for 20 ms between a fetch and what the graph has to be fed."""
    for k in range(steps):
        with coexec.GradientTape(**options):
            loss = (weight * 3).sum()
            loss.item()
            time.sleep(0.02)
            (loss * torch.full((2,), float(k))).sum().backward()


@pytest.fixture(params=["native", "interpreted"])
def runner(request, use_runner):
    if request.param == "native" and not (core and records_spans):
        pytest.skip("needs a native core that keeps spans")
    use_runner(request.param)


def disjoint_and_in_order(spans):
    return all(a.end_s <= b.begin_s + 1e-9 for a, b in itertools.pairwise(spans))


def test_a_profile_has_both_lanes_of_the_co_execution_phase(runner):
    weight = torch.nn.Parameter(torch.ones(2))
    iterate(weight, 4)

    with coexec.GradientTape.profile() as profile:
        iterate(weight, 3)

    timeline = profile.timeline
    assert [(i.number, i.phase) for i in timeline.iterations] == [(k, "co-execution") for k in (4, 5, 6)]
    [graph] = timeline.graph.values()
    begin, end = timeline.iterations[0].begin_s, timeline.iterations[-1].left_s
    assert begin == 0
    for spans in (timeline.python, graph):
        assert disjoint_and_in_order(spans)
        assert any(not s.stalled for s in spans)
        assert all(begin <= s.begin_s <= s.end_s <= end for s in spans)
    assert {s.name for s in timeline.python if s.stalled} <= {"fetch", "end of the block"}


def test_the_graph_stalls_while_python_sleeps(runner):
    weight = torch.nn.Parameter(torch.ones(2))
    slowly(weight, 5)

    with coexec.GradientTape.profile() as profile:
        slowly(weight, 1)

    [iteration] = profile.timeline.iterations
    [graph] = profile.timeline.graph.values()
    assert iteration.phase == "co-execution"
    assert any(s.stalled for s in graph)
    assert max(s.length_s for s in profile.timeline.python if not s.stalled) >= 0.02


@needs_dynamic
def test_a_profile_has_both_lanes_of_the_dynamic_phase(dynamic):
    def run(steps):
        for k in range(steps):
            with coexec.GradientTape():
                x = torch.ones(500, 500) / 500
                for _ in range(k % 3 + 1):
                    x = x @ x
                x.sum().item()

    run(6)
    with coexec.GradientTape.profile() as profile:
        run(3)

    timeline = profile.timeline
    assert {i.phase for i in timeline.iterations} == {"dynamic"}
    [graph] = timeline.graph.values()
    assert disjoint_and_in_order(graph)
    assert any(not s.stalled for s in graph)
    assert any(s.stalled for s in timeline.python)
    windows = [(i.begin_s, i.left_s) for i in timeline.iterations]
    assert all(any(b <= s.begin_s <= s.end_s <= e for b, e in windows) for s in graph if s.stalled)


@needs_dynamic
def test_after_a_profile_everything_is_as_it_was(dynamic):
    from coexec.programs import all_states

    weight = torch.nn.Parameter(torch.ones(2))
    iterate(weight, 4)
    [state] = all_states()
    queue = state.table.queue

    with coexec.GradientTape.profile():
        iterate(weight, 2)
        assert state.table.queue is not queue

    assert state.table.queue is queue
    iterate(weight, 2)
    assert queue.take_spans() == []
    assert active_profile() is None


def test_a_graph_runner_has_its_own_methods_again(runner):
    from coexec.programs import all_states

    weight = torch.nn.Parameter(torch.ones(2))
    iterate(weight, 4)
    [state] = all_states()
    before = dict(vars(state.graph_runner))

    with coexec.GradientTape.profile():
        iterate(weight, 2)
        assert state.graph_runner.fetch is not before.get("fetch")

    after = vars(state.graph_runner)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in ("fetch", "wait", "join", "cancel") if name in before)
    iterate(weight, 1)
    assert list(state.graph_runner.take_spans()) == []


@needs_spans
def test_results_under_a_profile_are_eagers():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    with coexec.GradientTape.profile() as profile:
        report = compare(linear, step, 8)

    assert report.coexec_share > 0.5
    assert [i.phase for i in profile.timeline.iterations].count("co-execution") == report.steps[
        "co-execution"
    ]


@needs_spans
def test_the_phases_of_iterations_are_named():
    weight = torch.nn.Parameter(torch.ones(2))

    with coexec.GradientTape.profile() as profile:
        for k in range(6):
            with coexec.GradientTape():
                loss = (weight * 3).sum()
                if k == 4:
                    loss = loss + 1
                loss.backward()

    phases = [i.phase for i in profile.timeline.iterations]
    assert phases == [*["tracing"] * 3, "co-execution", "fallback", "co-execution"]


@needs_spans
def test_without_waiting_for_the_end_python_stalls_where_a_result_is_used():
    weight = torch.nn.Parameter(torch.ones(64, 64))

    def run(steps):
        for _ in range(steps):
            with coexec.GradientTape(synchronous=False):
                loss = (weight @ weight).sum()
                loss.backward()
            loss.detach()

    run(4)
    with coexec.GradientTape.profile() as profile:
        run(3)

    names = {s.name for s in profile.timeline.python if s.stalled}
    assert "fetch" not in names
    blocks = [(i.begin_s, i.left_s) for i in profile.timeline.iterations]
    inside = [s for s in profile.timeline.python if any(b <= s.begin_s < e for b, e in blocks)]
    assert all(s.name != "use of a result" for s in inside)


@pytest.mark.parametrize("waits_for", ["random numbers", "the iteration before"])
def test_what_python_waits_for_is_none_of_its_own_time(waits_for):
    weight = torch.nn.Parameter(torch.ones(800, 800) / 800)
    kept = torch.zeros(())
    for _ in range(9):
        with coexec.GradientTape(synchronous=False):
            if waits_for == "the iteration before":
                kept.item()
            kept = weight
            for _ in range(12):
                kept = kept @ weight  # the skeleton takes a fraction of that
            if waits_for == "random numbers":
                kept = torch.nn.functional.dropout(kept)
            kept = kept.sum().detach()
    kept.item()

    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 5
    assert all(ms > 0 for ms in report.python_ms)
    assert sum(report.python_ms) < sum(report.python_stall_ms)


@needs_spans
def test_the_files_hold_the_timeline(tmp_path):
    pytest.importorskip("matplotlib")
    weight = torch.ones(600, 600)
    computing(weight, 4)

    with coexec.GradientTape.profile(tmp_path / "new") as profile:
        computing(weight, 2)

    written = json.loads((tmp_path / "new" / "timeline.json").read_text())
    assert written["traceEvents"] == json.loads(json.dumps(trace_events(profile.timeline)))
    complete = [e for e in written["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in complete} >= {"PythonRunner exec", "PythonRunner stall", "GraphRunner exec"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["pid"] == 1 for e in complete)
    threads = [e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"]
    assert threads[0] == "PythonRunner"
    assert threads[1].startswith("GraphRunner of test_profile.py:")
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "PythonRunner: " in profile.timeline.summary()


def test_a_profile_in_a_block_is_an_error():
    with coexec.GradientTape() as tape, pytest.raises(coexec.TapeError, match="goes around iterations"):
        tape.profile()


def test_a_profile_in_a_profile_is_an_error():
    with coexec.GradientTape.profile():
        with pytest.raises(coexec.TapeError, match="a profile is running already"):
            with coexec.GradientTape.profile():
                pass


def test_a_profile_without_iterations_cannot_be_saved(tmp_path):
    with pytest.raises(coexec.TapeError, match="no iteration ran inside of the profile"):
        with coexec.GradientTape.profile(tmp_path):
            pass


def test_a_timeline_before_the_end_is_an_error():
    with coexec.GradientTape.profile() as profile:
        with pytest.raises(coexec.TapeError, match="when the profile's with block has ended"):
            _ = profile.timeline


def test_the_error_of_a_profiled_program_leaves_the_profile(tmp_path):
    with pytest.raises(ZeroDivisionError), coexec.GradientTape.profile(tmp_path / "out"):
        with coexec.GradientTape():
            _ = 1 / 0

    assert active_profile() is None
    assert not (tmp_path / "out").exists()


# --- lanes ------------------------------------------------------------------------------------------

TICK = 10 * OVERHEAD_S


def spans_of(stalled):
    bounds = st.tuples(st.integers(0, 40), st.integers(1, 10))
    name = "waits" if stalled else "executes"
    return st.lists(bounds.map(lambda b: Span(b[0] * TICK, (b[0] + b[1]) * TICK, stalled, name)), max_size=8)


def covered(spans, tick):
    middle = (tick + 0.5) * TICK
    return any(s.begin_s <= middle < s.end_s for s in spans)


@given(spans_of(False), spans_of(True))
def test_in_a_lane_a_moment_is_a_stall_or_else_an_execution(executions, stalls):
    made = lane(executions, stalls)

    assert disjoint_and_in_order(made)
    for tick in range(52):
        assert covered([s for s in made if s.stalled], tick) == covered(stalls, tick)
        ours = covered([s for s in made if not s.stalled], tick)
        assert ours == (covered(executions, tick) and not covered(stalls, tick))


@given(spans_of(True), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=4))
def test_what_is_clipped_lies_in_a_window(spans, windows):
    bounds = [(begin * TICK, (begin + length) * TICK) for begin, length in windows]
    made = clipped(spans, bounds)

    for tick in range(52):
        middle = (tick + 0.5) * TICK
        inside = any(b <= middle < e for b, e in bounds)
        assert covered(made, tick) == (covered(spans, tick) and inside)


def test_a_wait_that_found_something_is_no_stall_and_overhead_is_execution():
    executions = [Span(0, 1, False, "e"), Span(1 + OVERHEAD_S / 2, 2, False, "e")]

    assert lane(executions, [Span(1, 1 + SHORTEST_STALL_S / 2, True, "w")]) == (Span(0, 2, False, "e"),)


# --- the log ----------------------------------------------------------------------------------------

PROGRAM = """
import torch, coexec
weight = torch.nn.Parameter(torch.ones(2))
for k in range(5):
    with coexec.GradientTape():
        loss = (weight * 3).sum()
        if k == 3:
            loss = loss + 1
        loss.backward()
"""


def test_torch_logs_shows_causes_and_phases(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"TORCH_LOGS": "+coexec", "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True
    )

    said = [line.partition("] ")[2] for line in done.stderr.splitlines() if "train.py:5: " in line]
    assert said == [
        "train.py:5: iteration 3: from here on in the co-execution phase",
        said[1],
        "train.py:5: iteration 4: from here on in the tracing phase",
        "train.py:5: iteration 4: from here on in the co-execution phase",
    ]
    assert said[1].startswith("train.py:5: iteration 4: CX0001 new path: Tensor.add where")


def test_without_torch_logs_nothing_is_printed(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_LOGS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_spans
def test_a_new_graph_runner_keeps_no_spans():
    assert list(make_graph_runner().take_spans()) == []
