"""Memory is flat over a long run, whatever phase the program is in, and nothing of an iteration is kept."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import types
import weakref

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import coexec
from bench.programs import PROGRAMS
from coexec.tracer.recorder import Recorder
from tests.coexec.harness import checkpoints, native
from tests.coexec.test_programs import start_run

WARM_UP, STEPS = 600, 2000
GROWTH_MB = 12  # what the allocator's free lists may come to


def resident_mb():
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # of glibc; tensors of ever other sizes leave holes
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 1e6


def growth_mb(step):
    for k in range(WARM_UP):
        step(k)
    before = resident_mb()
    for k in range(WARM_UP, STEPS):
        step(k)
    return resident_mb() - before


@pytest.mark.slow
def test_memory_is_flat_over_a_run_of_digits():
    run = start_run(PROGRAMS["digits"], "eager", seed=0, preset="tiny")

    def step(k):
        with run.active():
            run.training.step(coexec.GradientTape)
            run.steps += 1
            run.finish_epoch_if_due()

    assert growth_mb(step) < GROWTH_MB


def ragged(model, optimizer, lengths):
    """A step with a new path for each length, and a fallback now and then."""

    def step(k):
        x = torch.randn(lengths(k), 16)
        with coexec.GradientTape():
            h = model(x)
            if k % 50 == 49:
                print(end=str(h.mean().detach())[:0])
            loss = h.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [lambda k: 8 + (k % 40 == 39), lambda k: 1 + k % 23, lambda k: 1 + k % 997]
)
def test_memory_is_flat_over_a_run_with_fallbacks_and_shapes_that_vary(lengths, monkeypatch):
    monkeypatch.setattr("coexec.dynamic.table.MAX_SIGNATURES", 3_000)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64))
    step = ragged(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), lengths)

    assert growth_mb(step) < GROWTH_MB


@pytest.mark.parametrize("mode", ["on the graph", "dynamic"])
def test_no_frame_and_no_tensor_of_an_iteration_is_kept(mode, request):
    if mode == "dynamic":
        request.getfixturevalue("dynamic")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    references = []

    def step():
        x = torch.randn(3, 4)
        with coexec.GradientTape():
            h = model(x)
            loss = h.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        references.append([weakref.ref(t) for t in (x, h, loss)])

    for _ in range(8):
        step()
    gc.collect()

    assert all(r() is None for rs in references for r in rs)
    assert not [o for o in gc.get_objects() if type(o) is Recorder]
    frames = [o for o in gc.get_objects() if type(o) is types.FrameType]
    assert not [f for f in frames if f.f_code is step.__code__]


@native
@pytest.mark.parametrize("every", [1000, 6], ids=["on the graph", "with fallbacks"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_no_result_waits_for_the_garbage_collector(monkeypatch, synchronous, every):
    monkeypatch.setattr(coexec.options, "eager_if_faster", False)  # the last iteration is on the graph
    weight = torch.ones(7, 11, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for k in range(60):
            with coexec.GradientTape(synchronous=synchronous):
                y = weight * (k + 1.0)
                if k % every == 5:
                    with torch._C.DisableTorchFunction():  # on no path
                        y = y * y
                weight.grad = None
                y.sum().backward()
        weight.sum().item()
        del y
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        alive = [t for t in tensors if t.shape == weight.shape]
    finally:
        gc.enable()

    assert len(alive) <= 3  # the weight, its gradient, and what the last iteration may still hold


def garbage_of(step):
    """What of one step only the garbage collector can free."""
    gc.collect()
    gc.disable()
    try:
        step()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [type(o) for o in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Exp(torch.autograd.Function):
    """A function of the user's; its output is among what it saves."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[1]


def hooked(x):
    y = x.exp()
    y.register_hook(lambda g: g * 2)
    return y


def checkpointed(x):
    return checkpoint(lambda h: h.exp().tanh(), x, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [torch.exp, Exp.apply, hooked, pytest.param(checkpointed, marks=checkpoints)],
    ids=["plain", "with a custom function", "with a hook", "with a checkpoint"],
)
@pytest.mark.parametrize("way", ["traced", "on the graph", "asynchronous", "falls back", "raises", "dynamic"])
def test_nothing_of_an_iteration_is_left_to_the_garbage_collector(way, function, request):
    if way == "dynamic":
        request.getfixturevalue("dynamic")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    leaves = False

    def step():
        x = torch.randn(3, 4)
        with contextlib.suppress(ValueError), coexec.GradientTape(synchronous=way != "asynchronous"):
            loss = function(model(x)).pow(2).mean()
            if leaves and way == "falls back":
                loss = loss.sin()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if leaves and way == "raises":
                raise ValueError
        return loss.item()

    if way != "traced":
        for _ in range(8):
            step()
    leaves = True
    garbage = garbage_of(step)

    steps = coexec.explain().programs[-1].steps
    if way in ("on the graph", "asynchronous", "dynamic"):
        if function is not checkpointed:  # PyTorch itself leaves some functions
            assert garbage == []
        assert not [kind for kind in garbage if kind is types.FrameType or issubclass(kind, torch.Tensor)]
        assert steps["dynamic" if way == "dynamic" else "co-execution"]
    else:  # a new trace leaves some of what merged it
        assert not [kind for kind in garbage if kind is types.FrameType or issubclass(kind, torch.Tensor)]
        assert steps["tracing" if way == "traced" else "fallback"]
