"""The dynamic phase: calls run in order beside Python, and at each wait everything is what eager makes it."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import coexec
from coexec._native import core
from tests.coexec.harness import compare, linear, nothing, train, weights
from tests.coexec.test_optimizers import ONE_EVENT, regression

pytestmark = pytest.mark.skipif(core is None, reason="the native core is not built")


@pytest.fixture(params=["native lookup", "lookup in Python"])
def ran(request, dynamic, monkeypatch):
    """`compare` in the dynamic phase, with calls looked up by either implementation."""
    if request.param == "lookup in Python":
        monkeypatch.setattr(core.Sender, "step", lambda *arguments: NotImplemented)

    def run(*arguments, **options):
        report = compare(*arguments, **options)
        assert report.phase == "dynamic", report.summary()
        assert report.sent > 0, report.summary()
        return report

    return run


def reasons(report, name):
    return {reason for called, reason, _ in report.waits if called == name}


def count(report, name, reason):
    return sum(n for called, why, n in report.waits if (called, why) == (name, reason))


def test_a_call_with_one_tensor_twice_is_not_the_call_with_two(ran):
    def step(s, k, tape):
        x, y = torch.randn(3), torch.randn(3)
        with tape():
            a = x * 1
            b = a + (a if k < 4 else y * 1)
        return b

    ran(nothing, step, 12)


@pytest.mark.parametrize(
    "compare_tensors",
    [torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose, torch.Tensor.__contains__],
)
def test_a_tensor_is_compared_with_itself(ran, compare_tensors):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x).tanh()
            s.log.append(compare_tensors(y, y))
            s.log.append(compare_tensors(y, y.exp()))

    ran(linear, step, 8)


def test_two_tensors_on_the_same_memory_are_told_apart(ran):
    def step(s, k, tape):
        with tape():
            y = s.w * 2
            z = y * y.detach() if k % 2 else y.detach() * y
            s.w.grad = None
            z.sum().backward()

    ran(weights("w"), step, 9)


def test_a_value_is_looked_at_after_all_writes_before_it(ran):
    def step(s, k, tape):
        x = torch.randn(300, 300)
        with tape():
            y = x @ x
            view = y[0]
            for _ in range(3):
                y.mul_(0.5)
            print(view.sum().item(), y.sum().item(), y[0, 0])
            y.add_(1)
        return view

    ran(nothing, step, 6)


def test_what_is_written_through_a_view_is_written_once(ran):
    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            y = x.tanh()
            y[:, :2], y[:, 2:] = y[:, 1:], y[:, :1]
            y[1] += 1
            y.t()[0].mul_(2)
            print(y.sum().item())
        return y

    ran(nothing, step, 8)


def test_random_numbers_come_in_the_programs_order(ran):
    def step(s, k, tape):
        with tape():
            a = torch.rand(3)
            b = F.dropout(a, 0.5)
            if k % 2:
                torch.manual_seed(k)
            c = torch.randn(2)
            print(torch.get_rng_state().sum())
            d = torch.rand(3, generator=torch.Generator().manual_seed(k))
        return a, b, c, d

    ran(nothing, step, 8)


def test_gradients_accumulate_in_eagers_order(ran):
    def step(s, k, tape):
        with tape():
            parts = []
            for i in range(6):
                part = (s.w * (i + 0.1)).sin()
                parts.append(part if (i + k) % 3 else torch.from_numpy(part.detach().numpy()) * s.w)
            s.w.grad = None
            torch.stack(parts).sum(0).exp().mean().backward()

    ran(weights("w", size=31), step, 9)


def test_numbers_that_vary_are_fed(ran):
    def step(s, k, tape):
        x = torch.randn(4)
        with tape():
            y = x * (k + 0.5)
            z = y.clamp(-k, k + 1).add(y, alpha=k)
        return z

    report = ran(nothing, step, 12)

    assert count(report, "Tensor.mul", "it is recorded") == 2


@pytest.mark.parametrize("name", sorted(ONE_EVENT.keys() - {"Adam foreach"}))  # it makes a tensor of its own
def test_an_update_is_one_call(ran, name):
    functional, make_optimizer = ONE_EVENT[name]

    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            train(s, s.model(x).square().mean())
        for group in s.optimizer.param_groups:
            group["lr"] *= 0.9

    report = ran(regression(make_optimizer), step, 12)

    assert reasons(report, f"optim.{functional}.{functional}") == {"it is new", "it is recorded"}
    assert not {"Tensor.add_", "Tensor.mul_", "Tensor.lerp_", "Tensor.addcdiv_", "Tensor.addcmul_"} & {
        called for called, _, _ in report.waits
    }


def test_parameters_without_a_gradient_are_updated_apart(ran):
    def make():
        state = linear()
        state.model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.05)
        return state

    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            for number, layer in enumerate(s.model):
                if (k + number) % 3:
                    x = x + layer(x).tanh()
            train(s, x.square().mean())

    report = ran(make, step, 16)

    assert count(report, "optim.adam.adam", "it is recorded") <= 8, report.summary()


def test_counters_are_looked_at_when_the_update_before_is_done(ran):
    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            loss = s.model(x).square().mean()
            s.optimizer.zero_grad()
            loss.backward()
            for _ in range(1 + k % 3):
                s.optimizer.step()

    ran(regression(ONE_EVENT["Adam"][1]), step, 14)


def test_shapes_that_were_seen_are_not_waited_for_again(ran):
    def step(s, k, tape):
        x = torch.randn(2 + k % 4, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    report = ran(linear, step, 24)

    assert count(report, "nn.linear", "it is new") == count(report, "nn.linear", "it is recorded") == 4


def test_values_that_decide_about_shapes_are_waited_for(ran):
    def step(s, k, tape):
        x = torch.randn(6)
        with tape():
            chosen = x[x > 0]
            y = chosen.exp()
            packed = nn.utils.rnn.pack_padded_sequence(
                x.view(6, 1).expand(6, 2), torch.tensor([k % 5 + 2, 2])
            )
        return y, packed.data, len(chosen)

    report = ran(nothing, step, 8)

    depends = "the result of aten.index.Tensor depends on values"
    assert reasons(report, "Tensor.__getitem__") == {depends, "it is recorded", "it is new"}


def packed(s, k, tape):
    lengths = torch.tensor([4, 3, 1]) if k < 6 else torch.tensor([4, 2, 2])
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 3, 5), lengths)
    with tape():
        loss = s.model(x)[0].data.sum()
        train(s, loss)
    return loss


def recurrent():
    state = linear()
    state.model = nn.GRU(5, 4)
    state.optimizer = torch.optim.SGD(state.model.parameters(), 0.1)
    return state


def test_lengths_that_c_code_reads_from_memory_are_not_taken_for_constants(ran):
    report = ran(recurrent, packed, 10)

    assert "it may look at the values of an integer tensor" in reasons(report, "torch.gru")


def test_lengths_that_c_code_reads_from_memory_make_no_trace():
    report = compare(recurrent, packed, 10)

    assert report.dynamic_cause.startswith("CX0106")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 + ctx.saved_tensors[0] * 0


USER_CODE = {
    "custom function": lambda s, x: Scale.apply(s.model(x) * 2).sum(),
    "checkpoint": lambda s, x: checkpoint(lambda y: s.model(y).tanh(), x * 1, use_reentrant=False).sum(),
    "reentrant checkpoint": lambda s, x: checkpoint(
        lambda y: s.model(y).tanh(), x.requires_grad_(), use_reentrant=True
    ).sum(),
    "vmap": lambda s, x: torch.vmap(lambda row: s.model(row).tanh())(x * 1).sum(),
    "func grad": lambda s, x: (
        torch.func.grad(lambda y: (y * 2).pow(3).sum())(x * 1) * s.model(x).sum()
    ).sum(),
    "sparse": lambda s, x: torch.sparse.mm((x * 1).to_sparse(), s.model.weight.t()).sum(),
    "parameter": lambda s, x: (nn.Parameter(x * 2) * s.model(x).sum()).sum(),
    "autocast": lambda s, x: autocast(s.model, x).float().sum(),
}


def autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x * 1) + model(x)


@pytest.mark.parametrize("code", USER_CODE.values(), ids=USER_CODE)
def test_code_of_the_user_inside_of_pytorch_runs_as_in_eager(ran, code):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, code(s, x))

    ran(linear, step, 7)


def test_hooks_that_come_and_go_are_called(ran):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            if k % 2:
                h.register_hook(lambda g: s.log.append(g.sum().item()) or g * 2)
            handle = s.model.weight.register_hook(lambda g: g + k) if k > 4 else None
            train(s, h.tanh().sum())
            if handle is not None:
                handle.remove()

    ran(linear, step, 10)


@pytest.mark.parametrize("kind", ["index", "number"])
def test_what_fails_in_the_queue_raises_eagers_exception(ran, kind):
    def step(s, k, tape):
        x = torch.randn(5, 3)
        index = torch.tensor([0, 1 if k != 5 else 9])
        with tape():
            s.w.data.mul_(0.5)
            y = F.embedding(index, x) if kind == "index" else F.dropout(x, 0.2 + (k == 5))
            z = y * 2
            print(z.sum())
            s.w.data.add_(1)

    ran(weights("w"), step, 8)


def test_arrays_on_the_memory_of_tensors_are_seen(ran):
    def step(s, k, tape):
        array = np.random.rand(4).astype(np.float32)
        x = torch.from_numpy(array)
        with tape():
            y = x * 2
            array[0] = 7
            z = x + y
            w = z.numpy()
            z.mul_(2)
            w[1] = 3
            v = z.exp()
        return y, z, v, w

    ran(nothing, step, 8)


def test_views_and_flags_are_those_of_eager(ran):
    def step(s, k, tape):
        with tape():
            buffer = torch.zeros(3, 3)
            row = buffer[0]
            buffer[1] = s.w * 2
            print(row.requires_grad, row.is_leaf, buffer.grad_fn is not None)
            row2 = buffer[1]
            s.w.grad = None
            (row2 * row).sum().backward()
            s.w.requires_grad_(k % 3 != 0)
            print((s.w * 2).requires_grad)
            s.w.requires_grad_(True)
        return buffer.detach()

    ran(weights("w"), step, 8)


def test_small_calls_that_nothing_in_the_queue_has_to_do_with_are_made_at_once(monkeypatch):
    monkeypatch.setattr("coexec.program_state.PATIENCE", 1)

    def step(s, k, tape):
        x = torch.randn(50, 50)
        with tape():
            s.count += 1
            y = x @ x
            s.total += y.sum()
            s.total *= 0.5
            print(s.count.item())
        return y

    def make():
        state = nothing()
        state.count, state.total = torch.zeros(()), torch.zeros(())
        return state

    report = compare(make, step, 9)

    assert report.phase == "dynamic"
    assert not reasons(report, "Tensor.item")


def test_tensors_that_a_program_drops_are_dropped(dynamic):
    model, alive = nn.Linear(4, 4), []
    for _ in range(6):
        with coexec.GradientTape():
            h = model(torch.randn(3, 4))
            alive = [weakref.ref(h)]
            h = h.tanh()
            dropped = alive[0]() is None
            h = h.sum()
        del h
    gc.collect()

    assert dropped
    assert all(reference() is None for reference in alive)


def test_a_program_whose_paths_are_all_known_by_now_is_co_executed(monkeypatch):
    monkeypatch.setattr("coexec.program_state.MAX_FORMS", 64)  # backward passes stay whole
    monkeypatch.setattr("coexec.program_state.MAX_IN_ROW", 0)  # each fallback counts
    monkeypatch.setattr("coexec.program_state.FIRST_RETRY", 2)
    monkeypatch.setattr("coexec.program_state.RETRY_COST", 0)

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            for bit in range(3):
                if k >> bit & 1:
                    h = h.tanh() if bit else h * 2
            train(s, h.sum())

    report = compare(linear, step, 60)

    assert report.steps["dynamic"] > 0
    assert report.steps["co-execution"] > 10, report.summary()


def test_a_number_that_begins_to_vary_is_no_sign_that_a_program_has_no_graph():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        if k == 3:
            s.average = nn.Linear(4, 3).requires_grad_(False)
            s.average.load_state_dict(s.model.state_dict())
        with tape():
            y = s.model(x)
            if k >= 3:
                y = y - s.average(x)
            train(s, y.sum())
            if k >= 3:
                s.average.weight.lerp_(s.model.weight.detach(), 1 - min(0.9, (1 + k) / (10 + k)))

    report = compare(linear, step, 10)

    assert "dynamic" not in report.steps, report.summary()
    assert report.steps["co-execution"] >= 4, report.summary()


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam", "RMSprop"])
def test_layers_that_are_left_out_at_random(optimizer):
    def make():
        state = linear()
        state.model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        state.optimizer = getattr(torch.optim, optimizer)(state.model.parameters(), lr=0.05)
        state.coin = random.Random(0)
        return state

    def step(s, k, tape):
        x = torch.randn(4, 3)
        with tape():
            for layer in s.model:
                if s.coin.random() < 0.7:
                    x = x + layer(x).tanh()
            if x.requires_grad:
                train(s, x.square().mean())

    compare(make, step, 30)


def test_a_write_through_data_leaves_the_version_of_the_tensor():
    """What an earlier call has saved for its backward pass may still be used."""

    def step(s, k, tape):
        x = torch.randn(4, 4)
        if k % 2 == 0:
            x = s.model(x).tanh() @ s.model.weight.t().mm(s.model.weight)
        with tape():
            for _ in range(2):
                s.model.weight.data.clamp_(-1, 1)
            loss = (s.model(x) + x.sum()).square().mean()
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()

    def make():
        model = torch.nn.Linear(4, 4)
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))

    report = compare(make, step, 14)
    assert report.steps["dynamic"] >= 4


LAYOUTS = {
    "expanded": lambda x: x[:, :1].expand(-1, 3),
    "expanded from one": lambda x: x[0, 0].expand(4, 3),
    "windows": lambda x: x.unfold(1, 2, 1)[:, :, 0].t().expand(3, 2, 4),
    "columns": lambda x: x[:, ::2].repeat(1, 2)[:, :3].t(),
    "transposed": lambda x: x.t(),
}


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_that_numpy_may_know_is_sent_whatever_its_layout(layout, in_graph):
    def step(s, k, tape):
        x = LAYOUTS[layout](torch.randn(4, 3))
        with tape():
            h = s.model(torch.randn(2, 4)).tanh()
            seen = x.detach().numpy().copy() if k % 4 != 3 else None
            y = (x * h.mean()).cos()
            train(s, y.square().mean())
            s.log.append((seen, y.detach().stride()))
            if not in_graph:
                s.kept = s.model(x.reshape(-1)[:4])  # its history outlives the block

    report = compare(linear, step, 16)

    assert (report.phase == "dynamic") == (not in_graph)
