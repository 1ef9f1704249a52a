import faulthandler
import functools
from dataclasses import replace

import pytest
import torch

import coexec
from coexec import block_watch, tape
from coexec._native import core
from coexec.runners.graph_runner import make_graph_runner
from coexec.runners.interpreter import InterpretedRunner
from coexec.tracegraph.builder import Builder
from coexec.tracegraph.merge import Indistinct, merge
from tests.coexec import stepped
from tests.coexec.harness import compare

RUNNERS = {
    "native": make_graph_runner,
    "interpreted": InterpretedRunner,
    "python first": stepped.python_first,
    "graph first": stepped.graph_first,
    "seed 1": functools.partial(stepped.seeded, 1),
}


def leave_all_modes():
    """What a test that failed in the middle has left entered must not be another one's trouble."""
    while torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    while torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        torch.utils._python_dispatch._pop_mode()
    if block_watch._watches:
        block_watch._watches.clear()
        block_watch._uninstall()
    tape._active.depth = 0


#: Seconds after which a test hangs: it ends with the stack of every thread instead of never.
WATCHDOG_S = 600


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Each test starts without programs, on one thread, ends, and leaves global settings as they were."""
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    coexec.reset()
    monkeypatch.setattr(coexec.options, "background", False)  # each test says what runs its graph
    monkeypatch.setattr(coexec.options, "eager_if_faster", False)
    yield
    coexec.reset()
    leave_all_modes()
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def patient(monkeypatch):
    """Programs stay on the TraceGraph however many new paths they take."""
    monkeypatch.setattr("coexec.program_state.PATIENCE", 64)
    monkeypatch.setattr("coexec.program_state.MAX_FALLBACKS", 64)


@pytest.fixture
def in_pieces_always(monkeypatch):
    """Backward passes are in pieces from the first trace on."""
    monkeypatch.setattr("coexec.program_state.ALWAYS_IN_PIECES", True)


class Merges:
    """Merges as programs do, and compares each graph with that of a merge without a memory.

    Attributes:
        added: for each merge how many traces there were, and how many of them were added to a graph.
    """

    def __init__(self):
        self.added = []

    def merge(self, traces, memory, **options):
        added, add = [], Builder.add
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Builder, "add", lambda builder, trace: (added.append(trace), add(builder, trace)))
            graph = self._merged(traces, memory, **options)
        self.added.append((len(traces), len(added)))
        anew = self._merged(traces, **options)
        assert graph == anew
        if graph is None:
            raise Indistinct
        assert list(graph.edges.items()) == list(anew.edges.items())  # in this order they are looked at
        return graph

    @staticmethod
    def _merged(*arguments, **options):
        try:
            return merge(*arguments, **options)
        except Indistinct:
            return None


@pytest.fixture
def merges(monkeypatch):
    """Compares each merge of a program with a merge of all its traces."""
    checked = Merges()
    monkeypatch.setattr("coexec.program_state.merge", checked.merge)
    return checked


@pytest.fixture
def use_runner(monkeypatch):
    """Makes all programs use a GraphRunner: a name of `RUNNERS`, or what makes one."""

    def use(runner):
        monkeypatch.setattr("coexec.program_state.make_graph_runner", RUNNERS.get(runner, runner))

    return use


@pytest.fixture
def dynamic(monkeypatch):
    """Programs run call by call from the second iteration on, are not traced again, and send every call."""
    if core is None:
        pytest.skip("calls are sent by the native module")
    monkeypatch.setattr("coexec.dynamic.table.SMALL", 0)
    monkeypatch.setattr("coexec.program_state.PATIENCE", 1)
    monkeypatch.setattr("coexec.program_state.FIRST_RETRY", 1 << 20)
    monkeypatch.setattr("coexec.pace.TIMED", 1 << 20)


def compare_call_by_call(*arguments, **options):
    """`compare`, and the report as if the dynamic phase were the co-execution phase."""

    def renamed(report):
        assert report.phase == "dynamic", report.summary()
        steps = {**report.steps, "co-execution": report.steps.get("dynamic", 0)}
        return replace(report, phase="co-execution", steps=steps)

    reports = compare(*arguments, **options)
    return tuple(map(renamed, reports)) if isinstance(reports, tuple) else renamed(reports)


@pytest.fixture(params=["native", "interpreted", "lazy"])
def compared_on_the_graph(request, use_runner):
    """`compare` on each GraphRunner and in lazy mode."""
    return _compare_on(request.param, use_runner)


@pytest.fixture(params=["native", "interpreted", "lazy", "dynamic"])
def compared(request, use_runner):
    """`compare` on each GraphRunner, in lazy mode, and in the dynamic phase."""
    if request.param == "dynamic":
        request.getfixturevalue("dynamic")
        return compare_call_by_call
    return _compare_on(request.param, use_runner)


def _compare_on(name, use_runner):
    if name == "lazy":
        return functools.partial(compare, mode="lazy")
    use_runner(name)
    return compare
