"""Ctrl-C, wherever it comes."""

from __future__ import annotations

import _thread
import copy
import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import _GeneratorContextManager

import pytest
import torch
from torch import nn
from torch.overrides import handle_torch_function

import coexec
from coexec import interrupts
from coexec._native import core
from coexec.executors import inductor, job
from tests.coexec.harness import eager_tape
from tests.coexec.native_kernels import load
from tests.coexec.uncompiled import function_of, use_graphs

PACKAGE = os.path.dirname(coexec.__file__)


@pytest.fixture(autouse=True)
def interrupts_are_not_ignored():
    """What a shell starts in the background without job control ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Training:
    """A small training, whose state can be copied."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def copy(self):
        other = Training()
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def step(self, tape):
        with tape:
            loss = self.model(torch.randn(6, 4)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss

    def values(self):
        state = self.optimizer.state
        moments = [state[p][name] for p in self.model.parameters() for name in ("exp_avg", "exp_avg_sq")]
        grads = [p.grad for p in self.model.parameters()]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *moments, *grads)]


class InterruptedAt:
    """Has an interrupt come at the n-th line of coexec that this thread executes."""

    def __init__(self, line):
        self.left = line
        self.where = None

    def __enter__(self):
        sys.settrace(self._called)

    def __exit__(self, *error):
        sys.settrace(None)

    def _called(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                _thread.interrupt_main()
        return self._line


def interrupted(training, tape, line):
    """Trains until an interrupt at that line comes out; where that was, or None if no step has so many."""
    at = InterruptedAt(line)
    try:
        with at:
            training.step(tape()).item()
        for _ in range(1000 if at.where else 0):
            time.sleep(0.01)
    except KeyboardInterrupt:
        return at.where
    assert at.where is None, f"an interrupt at {at.where} was lost"
    return None


@pytest.mark.parametrize("synchronous", [True, False])
def test_whatever_line_of_coexec_an_interrupt_comes_at_training_goes_on_as_in_eager(synchronous):
    """The interrupt comes out once, and leaves nothing behind."""

    def tape():
        return coexec.GradientTape(synchronous=synchronous, executor="aten")

    training = Training()
    for _ in range(6):
        training.step(tape())
    places, line = [], 1
    while (where := interrupted(training, tape, line)) is not None:
        places.append(where)
        line += 1 + line // 20
        before = training.copy()
        torch.manual_seed(line)
        losses = [training.step(tape()).item() for _ in range(2)]
        assert torch.overrides._get_current_function_mode() is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        torch.manual_seed(line)
        assert losses == [before.step(eager_tape()).item() for _ in range(2)], where
        assert all(map(torch.equal, training.values(), before.values())), where
    [program] = coexec.explain().programs

    assert [c for c in program.causes if c.id != "CX0002"] == []
    assert program.steps["co-execution"] >= 2 * len(places)
    assert len({place.split(":")[0] for place in places}) > 5


def test_an_interrupt_of_the_programs_own_code_leaves_the_block_at_once():
    training = Training()

    def tape():
        return coexec.GradientTape(executor="aten")

    for _ in range(6):
        training.step(tape())

    def interrupted_step():
        with tape():
            loss = training.model(torch.randn(6, 4)).square().mean()
            signal.raise_signal(signal.SIGINT)
            loss.backward()

    weight = training.model[0].weight.clone()
    with pytest.raises(KeyboardInterrupt):
        interrupted_step()

    assert torch.equal(weight, training.model[0].weight)
    assert torch.overrides._get_current_function_mode() is None
    assert training.step(tape()).isfinite()


def test_a_second_interrupt_is_not_put_off(monkeypatch):
    came = []
    monkeypatch.setattr(interrupts, "_at_work", lambda frame: True)
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    placed = interrupts.put_off()
    try:
        _thread.interrupt_main()
        time.sleep(0.1)
        assert came == []
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
        time.sleep(0.1)
        assert came == [signal.SIGINT]
    finally:
        interrupts.as_before(placed)
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_put_off_for_a_limited_time(monkeypatch):
    came = threading.Event()
    monkeypatch.setattr(interrupts, "_at_work", lambda frame: True)
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.05)
    before = signal.signal(signal.SIGINT, lambda number, frame: came.set())
    placed = interrupts.put_off()
    try:
        _thread.interrupt_main()
        assert came.wait(30)
    finally:
        interrupts.as_before(placed)
        signal.signal(signal.SIGINT, before)


def test_handlers_that_the_program_sets_in_a_block_stay():
    def mine(number, frame):
        raise AssertionError("nobody has sent a signal")

    with coexec.GradientTape():
        signal.signal(signal.SIGINT, mine)

    assert signal.getsignal(signal.SIGINT) is mine


def test_a_block_that_cannot_be_entered_leaves_the_handlers_as_they_were():
    tape = coexec.GradientTape()
    with tape, pytest.raises(coexec.TapeError):
        tape.__enter__()

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not job.finds_native(), reason="blocks do not find the native kernels")
@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_ends_the_wait_of_a_thread_that_computes_parts(monkeypatch, fails):
    """Also if the block fails then, and the iteration becomes an eager one."""
    native = load()
    use_graphs(monkeypatch.setattr)
    monkeypatch.setattr(inductor, "kernel_parts", lambda: 2)
    monkeypatch.setattr(inductor, "kernel_threads", lambda: 1)
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    started = threading.Event()

    def library_of(block):
        run = function_of(block)

        def compute(inputs):
            started.set()
            getattr(native, "__wrap_GOMP_parallel")(sleep, ctypes.c_void_p(200_000), 4, 0)
            if fails:
                raise RuntimeError("no")
            return run(inputs)

        return core.Library(compute)

    monkeypatch.setattr(inductor, "library_of", library_of)

    def interrupt():
        if started.wait(30):
            time.sleep(0.1)
            _thread.interrupt_main()

    training = Training()
    thread = threading.Thread(target=interrupt)
    thread.start()

    def train():
        for _ in range(8):
            training.step(coexec.GradientTape(executor="inductor"))
        time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        train()
    thread.join()
    before = training.copy()
    torch.manual_seed(1)
    losses = [training.step(coexec.GradientTape(executor="inductor")).item() for _ in range(3)]
    torch.manual_seed(1)

    # Adam is made of other operations in a block.
    assert losses == pytest.approx([before.step(eager_tape()).item() for _ in range(3)], rel=1e-5)


@pytest.mark.parametrize("phase", ["tracing", "co-execution"])
def test_an_interrupt_while_pytorch_has_taken_the_mode_off_waits_until_it_is_back(phase):
    x = torch.ones(3)

    def interrupted(frame, event, argument):
        codes = frame.f_code, frame.f_back.f_code
        if codes == (_GeneratorContextManager.__exit__.__code__, handle_torch_function.__code__):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    def step(interrupt):
        with coexec.GradientTape():
            if interrupt:
                sys.settrace(interrupted)
            y = handle_torch_function(torch.add, (), x, x)
            if interrupt:
                time.sleep(10)
        return y.sum().item()

    for _ in range(0 if phase == "tracing" else 4):
        step(False)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(True)
    finally:
        sys.settrace(None)

    assert not torch.overrides._get_current_function_mode_stack()
    assert [step(False) for _ in range(4)] == [6.0] * 4
