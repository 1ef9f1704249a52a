"""Memory of values of the GraphRunner, which the next ones get."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import coexec
from coexec._native import core

#: For so many iterations a peak counts.
PEAK_COUNTS = 16

pytestmark = pytest.mark.skipif(core is None, reason="there is no native GraphRunner here")


@pytest.fixture(autouse=True)
def nothing_kept():
    gc.collect()
    for _ in range(2 * PEAK_COUNTS):
        core.begin_keeping()
    core.give_memory_back()


@contextmanager
def keeping():
    """Has this thread keep memory, as the GraphRunner's does."""
    keeps = core.KeepsMemory()
    try:
        yield
    finally:
        del keeps


def bytes_of(tensor):
    return tensor.untyped_storage().nbytes()


def unused():
    return core.kept_bytes()[1]


def test_the_next_tensor_of_a_size_gets_the_memory_of_the_last_one():
    with keeping():
        first = torch.empty(1000)
        place = first.data_ptr()
        del first
        assert torch.empty(1000).data_ptr() == place
    assert unused() == 4000


def test_a_tensor_does_not_get_memory_that_is_much_larger():
    with keeping():
        large = torch.empty(1_000_000)  # beside which what is kept here is little
        first = torch.empty(1200)
        place = first.data_ptr()
        del first
        a_little_smaller = torch.empty(1150)
        assert a_little_smaller.data_ptr() == place
        del a_little_smaller
        assert torch.empty(1000).data_ptr() != place
    del large


def test_only_threads_that_ask_for_it_keep_memory():
    made = []
    before = core.kept_bytes()
    with keeping():
        thread = threading.Thread(target=lambda: made.append(torch.empty(1000)))
        thread.start()
        thread.join()
    made.append(torch.empty(1000))
    assert core.kept_bytes() == before


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 20), st.sampled_from([64, 1000, 4096, 50_000])), max_size=60
    )
)
def test_what_is_used_and_kept_is_hardly_more_than_was_used_at_once(changes):
    core.give_memory_back()
    for _ in range(2 * PEAK_COUNTS):
        core.begin_keeping()
    peak = 0
    tensors = []
    with keeping():
        for makes, which, size in changes:
            if makes or not tensors:
                tensors.append(torch.empty(size, dtype=torch.uint8))
            else:
                del tensors[which % len(tensors)]
            used, kept = core.kept_bytes()
            peak = max(peak, used)
            assert used >= sum(map(bytes_of, tensors))
            assert used + kept <= 1.05 * peak
            assert len({t.data_ptr() for t in tensors}) == len(tensors)


def test_a_peak_is_forgotten_after_some_iterations():
    with keeping():
        large = torch.empty(1_000_000)
        del large
        assert unused() == 4_000_000
        for _ in range(2 * PEAK_COUNTS):
            core.begin_keeping()
        torch.empty(100)
    assert unused() == 400


def test_memory_of_onednn_may_be_given_back_by_a_thread_that_keeps_none_and_the_other_way_round():
    before = core.kept_bytes()[0]  # of tensors that somebody holds since an iteration was traced
    usual = torch.ones(2, 8, 6, 6).to_mkldnn()
    with keeping():
        kept = torch.ones(2, 8, 6, 6).to_mkldnn()
        assert core.kept_bytes()[0] > before
        assert usual.to_dense().sum() == kept.to_dense().sum() == 576
        del usual
    del kept
    assert core.kept_bytes()[0] == before  # what is unused may be gone: an earlier GraphRunner is idle


def test_arrays_and_views_hold_memory():
    with keeping():
        array = torch.arange(1000).numpy()
        view = torch.arange(1000)[10:20]
        others = [torch.zeros(1000, dtype=torch.int64) for _ in range(5)]
    assert array.tolist() == list(range(1000))
    assert view.tolist() == list(range(10, 20))
    assert not any(other.any() for other in others)


def test_a_kept_tensor_grows_is_copied_lazily_and_is_shared_between_processes():
    with keeping():
        grows, lazy, shared = torch.arange(10), torch.arange(10), torch.arange(10)
    grows.resize_(1000)
    copy = lazy._lazy_clone()
    lazy.zero_()
    shared.share_memory_()
    assert grows[:10].tolist() == copy.tolist() == shared.tolist() == list(range(10))
    assert shared.is_shared()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_frees_memory_while_the_graph_runner_makes_tensors():
    stop = threading.Event()

    def make():
        with keeping():
            while not stop.is_set():
                torch.empty(1000)

    thread = threading.Thread(target=make)
    with keeping():
        tensor = torch.empty(1000)
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                del tensor
                os._exit(0)
            deadline = time.monotonic() + 20
            done, status = os.waitpid(pid, os.WNOHANG)
            while not done and time.monotonic() < deadline:
                time.sleep(0.001)
                done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            assert done, "the forked process waits for a lock"
            assert status == 0
    finally:
        stop.set()
        thread.join()


def test_a_graph_runner_without_work_gives_memory_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    most = 0
    for _ in range(8):
        with coexec.GradientTape():
            optimizer.zero_grad()
            loss = model(torch.ones(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
        loss.item()
        most = max(most, unused())
    assert most > 0
    deadline = time.monotonic() + 20
    while unused() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert unused() == 0


PEAK = """
import sys
import torch
import coexec

mode, other = sys.argv[1], int(sys.argv[2])
coexec.options.eager_if_faster = False
weight = torch.nn.Parameter(torch.ones(512, 512))
optimizer = torch.optim.SGD([weight], lr=1e-3)


def megabytes(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024


base = megabytes("VmRSS")
for k in range(8):
    x = torch.ones(512, 512)
    with coexec.GradientTape(mode=mode):
        for _ in range(150):
            x = torch.sin(x * weight)  # a megabyte each is saved
        if k == other:
            x = x.exp()
        optimizer.zero_grad()
        x.sum().backward()
        optimizer.step()
print(megabytes("VmHWM") - base, coexec.explain().programs[0].steps if mode != "eager" else {})
"""


def peak(mode, other):
    command = [sys.executable, "-c", PEAK, mode, str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    megabytes, steps = done.stdout.split(maxsplit=1)
    return float(megabytes), steps


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux says what the peak was")
@pytest.mark.parametrize("other", [1000, 6], ids=["on the graph", "with a fallback"])
def test_tracing_and_the_first_iterations_on_the_graph_need_hardly_more_memory_than_eager_ones(other):
    eager, _ = peak("eager", other)
    ours, steps = peak("coexec", other)

    assert "tracing" in steps
    assert "co-execution" in steps
    assert ("fallback" in steps) == (other == 6)
    assert 250 < eager < 400
    assert ours < 1.2 * eager, steps
