"""An iteration that leaves the graph is an eager one from its first call on, whoever holds what."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coexec
from tests.coexec.harness import coexecuted, compare, eager_tape, linear, native, train, weights


@dataclass
class Box:
    value: object = None


def test_placeholders_held_anywhere_become_the_real_tensors(compared):
    def step(s, k, tape):
        box, closure = Box(), []
        with tape():
            y = s.w * 2
            z = y.exp()
            box.value = [y, {"z": z}]
            closure.append(lambda: y + z)
            if k == 5:
                extra = closure[0]() * 3
                print(
                    box.value[0] is y,
                    box.value[1]["z"] is z,
                    extra,
                    type(y),
                    y.grad_fn.name(),
                    z.requires_grad,
                )
                extra.sum().backward()
            else:
                (y * z).sum().backward()
            grad, s.w.grad = s.w.grad, None
            box.value, y, z = None, None, None
            closure.clear()
        return grad

    assert coexecuted(compared(weights("w"), step, 9), 4)


def test_the_traceback_of_an_exception_holds_real_tensors():
    def step(s, k, tape):
        x = torch.arange(3.0) + k
        with tape():
            y = x * 2
            s.total = y.sum()
            if k == 5:
                raise ValueError("mine")
        return None

    state = weights("w")()
    for k in range(6):
        try:
            step(state, k, coexec.GradientTape)
        except ValueError as e:
            local = e.__traceback__.tb_next.tb_frame.f_locals
            assert local["y"].tolist() == [10.0, 12.0, 14.0]
            assert state.total.item() == 36.0


def test_gradients_flow_through_what_was_replayed(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            loss = h.pow(2).mean()
            s.optimizer.zero_grad()
            loss.backward(retain_graph=True)
            first = s.model.weight.grad
            if k == 5:
                (h * 2).sum().backward()
                print(first is s.model.weight.grad, first)
            s.optimizer.step()
            del h, loss, first

    assert coexecuted(compared(linear, step, 9), 3)


def test_gradients_set_before_the_new_path_are_set_once(compared):
    def step(s, k, tape):
        with tape():
            s.w.grad = None
            (s.w * s.w).sum().backward()
            s.w.grad = s.w.grad * 2
            s.w.grad.mul_(3)
            if k == 5:
                s.w.grad = s.w.grad + 1
                print(s.w.grad)
            with torch.no_grad():
                s.w -= 0.01 * s.w.grad

    assert coexecuted(compared(weights("w"), step, 9), 4)


@pytest.mark.parametrize("at", [4, 5, 6])
def test_training_goes_on_in_the_phase_that_explain_names(at):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            if k >= at:
                loss = loss * 2
            train(s, loss)

    report = compare(linear, step, 10)

    assert report.fallbacks == 1
    assert report.steps["co-execution"] == 10 - 3 - 1


def test_two_threads_train_at_one_place_with_keys_of_their_own():
    batches = torch.randn(2, 12, 5, 4)

    def work(index, tape, out, barrier):
        torch.set_num_threads(1)
        state = out[index]
        for k in range(12):
            barrier.wait(30)
            with tape(key=index):
                train(state, state.model(batches[index, k]).pow(2).mean())

    finals = []
    for tape in (eager_tape, coexec.GradientTape):
        torch.manual_seed(0)
        out, barrier = [linear(), linear(lr=0.2)], threading.Barrier(2)
        threads = [threading.Thread(target=work, args=(i, tape, out, barrier)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        finals.append([p.detach().clone() for s in out for p in s.model.parameters()])

    assert all(map(torch.equal, *finals))
    for report in coexec.explain().programs:
        assert coexecuted(report, 6)


def test_a_tape_at_a_place_that_another_thread_is_in_runs_eagerly():
    inside, done = threading.Event(), threading.Event()
    seen = []

    def block(first):
        with coexec.GradientTape():
            x = torch.ones(2) * 3
            if first:
                inside.set()
                done.wait(30)
        seen.append(x.tolist())

    thread = threading.Thread(target=block, args=(True,))
    thread.start()
    inside.wait(30)
    block(False)
    done.set()
    thread.join()

    assert seen == [[3.0, 3.0]] * 2
    [report] = coexec.explain().programs
    assert [c.id for c in report.causes] == ["CX0119"]


def test_putting_back_what_numpy_shares_is_no_write_to_autograd(compared):
    def step(s, k, tape):
        x = torch.randn(4, 4)
        with tape():
            h = s.model(x)
            with contextlib.suppress(RuntimeError):
                x.detach().numpy().copy()
                if k % 3 == 1:
                    x @ x[:2]
            train(s, (x[:, :3] + h).square().mean())

    compared(linear, step, 12)


@pytest.mark.filterwarnings("ignore")  # TorchInductor's own
@pytest.mark.parametrize("executor", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_fails_in_a_block_is_eagers_error_and_training_goes_on(executor):
    table, optimizer = torch.nn.Embedding(5, 3), None
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step(indices):
        with coexec.GradientTape(executor=executor):
            loss = table(indices).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    for _ in range(6):
        step(torch.tensor([0, 1, 4]))
    before = table.weight.detach().clone()
    with pytest.raises(IndexError, match="out of range"):
        step(torch.tensor([0, 1, 7]))
    after = table.weight.detach().clone()
    for _ in range(3):
        step(torch.tensor([0, 1, 4]))
    [report] = coexec.explain().programs
    [cause] = [c for c in report.causes if c.id == "CX0005"]

    assert torch.equal(before, after)
    assert cause.where.startswith("test_fallback.py:")
    assert not torch.equal(after, table.weight)
    assert report.phase == "co-execution"


def test_a_fallback_with_memory_that_numpy_knows_is_traced():
    """The memory is put back to what it was when it was fed, and that is no operation of the program."""

    def step(s, k, tape):
        array = np.random.randn(4, 4).astype(np.float32)
        with tape():
            loss = s.model(torch.from_numpy(array)).square().mean()
            if k % 4 == 3:
                loss = loss * 2
            train(s, loss)

    report = compare(linear, step, 16)

    assert report.fallbacks == 1, report.summary()
    assert coexecuted(report, 11)


def test_a_view_that_cannot_be_used_any_more_is_not_looked_at():
    """The base of one of several views is written; only to use the view is an error then."""

    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            h = s.model(x)
            copy = x.clone()
            copy.chunk(2)[0].fill_(0.5)
            copy.add_(h)
            del copy
            train(s, (x + h).square().mean())
        if k == 2:
            s.optimizer.add_param_group({"params": list(s.more.parameters())})

    def make():
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return SimpleNamespace(model=model, optimizer=optimizer, more=torch.nn.Linear(3, 3))

    report = compare(make, step, 12)
    assert report.fallbacks, report.summary()


@native
def test_a_fallback_that_teaches_the_graph_nothing_is_not_forgiven():
    """The values of the lengths decide about a size inside of the loss, which no trace tells."""

    def step(s, k, tape):
        x, targets = torch.randn(5, 4), torch.randint(1, 3, (1, 2))
        with tape():
            scores = s.model(x)[:, None].log_softmax(-1)
            lengths = torch.tensor([5]), torch.tensor([1 + k % 2])
            train(s, torch.nn.functional.ctc_loss(scores, targets, *lengths))

    report = compare(linear, step, 20)

    assert report.phase == "dynamic"
    assert report.fallbacks <= 4
