"""Kernels of which a thread that waits computes parts."""

from __future__ import annotations

import threading
import time
import zipfile

import pytest
import torch
from torch import nn

import coexec
from coexec import _private_inductor, sessions
from coexec._native import core
from coexec.executors import inductor, job
from tests.coexec.harness import eager_tape
from tests.coexec.native_kernels import handle, load, region
from tests.coexec.uncompiled import function_of, use_graphs

pytestmark = pytest.mark.skipif(not job.finds_native(), reason="blocks do not find the native kernels")


@pytest.fixture(scope="module")
def native():
    return load()


# A block's "library" is a Python function here, which runs a region of OpenMP's whose body is one, too.


def train(enter, steps=8, inside=lambda: None):
    """Trains a little, calling `inside` in each step's block; returns the losses."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        with enter():
            loss = model(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            inside()
        losses.append(loss.item())
    return losses


@pytest.fixture
def in_each_block(monkeypatch):
    """Has blocks share their kernels, and run a function first that is given to what this returns."""
    use_graphs(monkeypatch.setattr)
    monkeypatch.setattr(inductor, "kernel_parts", lambda: 2)
    monkeypatch.setattr(inductor, "kernel_threads", lambda: 1)

    def install(first):
        def library_of(block):
            run = function_of(block)
            return core.Library(lambda inputs: (first(), run(inputs))[1])

        monkeypatch.setattr(inductor, "library_of", library_of)

    return install


def test_a_thread_that_waits_computes_a_part(native, in_each_block):
    together = threading.Barrier(2, timeout=30)
    by_part = {0: set(), 1: set()}

    def body(part):
        together.wait()  # passes when two threads compute a part each
        by_part[part].add(threading.get_ident())

    in_each_block(lambda: region(native, 2, body))
    losses = train(lambda: coexec.GradientTape(executor="inductor"))

    assert threading.get_ident() in by_part[0] | by_part[1]
    assert len(by_part[0] | by_part[1]) == 2
    assert losses == train(eager_tape)


def test_where_nobody_waits_one_thread_computes_all_parts_in_order(native, in_each_block, monkeypatch):
    # The GraphRunner may start when Python waits, otherwise.
    monkeypatch.setattr(sessions, "_is_timed", lambda: False)
    computed, over = [], threading.Event()

    def block():
        if over.is_set():
            return  # this is what is put off to the commit, for which Python waits
        computed.clear()
        region(native, 5, lambda part: computed.append((threading.get_ident(), part)))
        over.set()

    def begin():
        over.clear()
        return coexec.GradientTape(executor="inductor")

    def stay_busy():
        if any(p.steps.get("co-execution") for p in coexec.explain().programs):
            assert over.wait(30)

    in_each_block(block)
    losses = train(begin, inside=stay_busy)

    assert [part for _, part in computed] == [0, 1, 2, 3, 4]
    [thread] = {thread for thread, _ in computed}
    assert thread != threading.get_ident()
    assert losses == train(eager_tape)


def state_of_thread():
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_mode_enabled(),
    )


def test_who_computes_a_part_has_none_of_its_own_modes_and_gets_them_back(native, in_each_block):
    together, seen = threading.Barrier(2, timeout=30), {}

    def body(part):
        together.wait()
        seen[threading.get_ident()] = state_of_thread()

    in_each_block(lambda: region(native, 2, body))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = nn.Linear(4, 2)
    try:
        for _ in range(8):
            with coexec.GradientTape(executor="inductor"), torch.autocast("cpu"):
                before = state_of_thread()
                model(torch.randn(3, 4)).square().mean().item()
                after = state_of_thread()
    finally:
        torch.set_num_threads(threads)

    assert seen[threading.get_ident()] == (1, False, False, 0, False)
    assert before == after
    assert before[:3] == (2, True, True)


def test_a_failure_in_a_part_leaves_the_runners_as_they_were(native, in_each_block):
    a, b, out = torch.randn(300, 300), torch.randn(300, 300).double(), torch.empty(300, 300)
    statuses = []

    in_each_block(lambda: statuses.append(native.coexec_cpu_mm_out(handle(out), handle(a), handle(b))))
    losses = train(lambda: coexec.GradientTape(executor="inductor"))

    assert statuses
    assert 0 not in statuses
    assert losses == train(eager_tape)


def test_each_part_is_computed_once_however_many_there_are(native, in_each_block):
    lock, counts, wrong = threading.Lock(), {}, []

    def body(part):
        with lock:
            counts[part] = counts.get(part, 0) + 1

    def block():
        for parts in (0, 1, 2, 3, 64, 1000):  # 0 leaves it to OpenMP
            counts.clear()
            region(native, parts, body)
            if counts != dict.fromkeys(range(parts or 1), 1):
                wrong.append((parts, dict(counts)))

    in_each_block(block)
    train(lambda: coexec.GradientTape(executor="inductor"))

    assert counts
    assert not wrong


# What is compiled.


@pytest.mark.parametrize(
    ("source", "safe"),
    [
        ("#pragma omp parallel num_threads(2)\n#pragma omp for\n", True),
        ("#pragma omp simd simdlen(8)\n", True),
        ("#pragma omp parallel num_threads(2)\n#pragma omp for\n#pragma omp for\n", False),
        ("#pragma omp parallel num_threads(2)\n#pragma omp for\n#pragma omp single\n", False),
        ("#pragma omp parallel num_threads(2)\n#pragma omp for\n#pragma omp barrier\n", False),
    ],
)
def test_a_region_whose_threads_wait_for_each_other_is_not_cut(tmp_path, source, safe):
    file = tmp_path / "kernel.cpp"
    file.write_text(source)

    assert _private_inductor._is_cut_safely(str(file)) is safe


@pytest.mark.parametrize(("name", "safe"), [(b"__wrap_GOMP_parallel", True), (b"GOMP_critical_start", False)])
def test_a_library_that_calls_more_of_openmp_is_not_used(tmp_path, name, safe):
    file = tmp_path / "kernel.so"
    file.write_bytes(b"\x7fELF\0" + name + b"\0GOMP_4.0\0")

    assert _private_inductor._is_cut_safely(str(file)) is safe


def compiled_training(monkeypatch, tmp_path, parts, pause=0.0, **options):
    """Losses and parameters of a net whose kernels are large enough to be cut, and its compiled blocks."""
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(coexec.options, "background", False)
    for module in (inductor, job):
        monkeypatch.setattr(module, "kernel_parts", lambda: parts)
        monkeypatch.setattr(module, "kernel_threads", lambda: 1)
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3), nn.Flatten()
    )
    model = nn.Sequential(body, nn.Linear(16 * 12 * 12, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        x, y = torch.randn(32, 3, 16, 16), torch.randint(0, 4, (32,))
        with coexec.GradientTape(executor="inductor", **options) if parts else eager_tape():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        time.sleep(pause)
        losses.append(loss.detach())
    values = [p.detach() for p in model.parameters()]
    return torch.stack([loss.clone() for loss in losses]), values, list(tmp_path.glob("*.pt2"))


def text_of(packages, suffix):
    text = b""
    for package in packages:
        with zipfile.ZipFile(package) as files:
            text += b"".join(files.read(name) for name in files.namelist() if name.endswith(suffix))
    return text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cut_kernels_compute_what_whole_ones_do_whoever_waits(monkeypatch, tmp_path):
    compiled_training(monkeypatch, tmp_path, 2)  # a block that is not on disk comes a step later
    losses, values, packages = compiled_training(monkeypatch, tmp_path, 2)
    alone, own, _ = compiled_training(monkeypatch, tmp_path, 2, pause=0.05, synchronous=False)
    expected, rights, _ = compiled_training(monkeypatch, tmp_path, 0)

    code = text_of(packages, ".so")
    for name in (b"coexec_cpu_mm_out", b"coexec_cpu_convolution", b"__wrap_GOMP_parallel"):
        assert name in code
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for mine, right in zip(values, rights, strict=True):
        # Adam divides by what is nearly nothing.
        torch.testing.assert_close(mine, right, rtol=1e-2, atol=1e-3)
    assert torch.equal(losses, alone)
    assert all(map(torch.equal, values, own))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_block_that_cannot_be_cut_is_compiled_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(_private_inductor, "_is_cut_safely", lambda file: False)
    losses, _, packages = compiled_training(monkeypatch, tmp_path, 2)
    expected, _, _ = compiled_training(monkeypatch, tmp_path, 0)

    assert packages
    assert b"coexec_cpu" not in text_of(packages, ".so")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_kernels_are_cut_where_a_processor_is_left_to_python_and_two_threads_are_asked_for(monkeypatch):
    def parts(processors, threads):
        monkeypatch.setattr(job, "processors", lambda: processors)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return job.kernel_parts()

    assert parts(2, 2) == 2
    assert parts(1, 1) == parts(2, 1) == parts(4, 4) == parts(16, 16) == 1
