"""Gradients by hand and by optimizers; hooks; what a backward pass leaves behind."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from tests.coexec.harness import Twice, coexecuted, compare, linear, nothing, train, weights

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD maximize": lambda p: optim.SGD(p, lr=0.1, maximize=True),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: optim.Adam(p),
    "Adam foreach": lambda p: optim.Adam(p, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, fused=True),
    "AMSGrad": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr_decay=0.01),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Rprop": lambda p: optim.Rprop(p),
    "Adafactor": lambda p: optim.Adafactor(p),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_steps_as_in_eager(make_optimizer):
    def make():
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return SimpleNamespace(model=model, optimizer=make_optimizer(model.parameters()))

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            train(s, loss)
        return loss.detach()

    assert coexecuted(compare(make, step, 12), 7)


def test_an_optimizer_with_a_closure_is_right():
    def make():
        w = nn.Parameter(torch.randn(4))
        return SimpleNamespace(w=w, _optimizer=optim.LBFGS([w], max_iter=4))

    def step(s, k, tape):
        def closure():
            s._optimizer.zero_grad()
            loss = (s.w**2).sum() + s.w.exp().sum()
            loss.backward()
            return loss

        with tape():
            s._optimizer.step(closure)

    compare(make, step, 6)


def test_two_backward_passes_and_a_retained_graph(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            s.optimizer.zero_grad()
            y = s.model(x)
            y.pow(2).mean().backward(retain_graph=True)
            y.exp().mean().backward()
            s.optimizer.step()

    assert coexecuted(compared(linear, step, 9), 5)


def test_a_gradient_penalty_differentiates_twice(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            x = x.clone().requires_grad_()
            y = s.model(x).pow(3).mean()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            train(s, y + grad.pow(2).sum())

    assert coexecuted(compared(linear, step, 9), 5)


def test_gradients_through_the_tape_keep_the_structure_of_the_sources(compared):
    def step(s, k, tape):
        with tape() as t:
            loss = (s.a * s.b).sum() + s.a.exp().sum()
            grads = t.gradient(loss, {"a": s.a, "rest": [s.b, (s.c,)]})
            with torch.no_grad():
                s.a -= 0.1 * grads["a"]
                s.b -= 0.1 * grads["rest"][0]
            print(grads["rest"][1])
        return grads

    assert coexecuted(compared(weights("a", "b", "c"), step, 8), 4)


def test_gradients_are_zeroed_in_place(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            s.optimizer.zero_grad(set_to_none=False)
            s.model(x).pow(2).mean().backward()
            s.optimizer.step()

    assert coexecuted(compared(linear, step, 9), 5)


def test_gradients_accumulate_over_iterations(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            loss.backward()
            if k % 3 == 2:
                s.optimizer.step()
                s.optimizer.zero_grad()
        return loss.detach()

    compared(linear, step, 15)


def test_an_iteration_that_accumulates_gradients_is_coexecuted():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            s.model(x).pow(2).mean().backward()
            if k % 3 == 2:
                s.optimizer.step()
                s.optimizer.zero_grad()

    assert coexecuted(compare(linear, step, 15), 5)


def test_gradients_are_read_kept_replaced_and_deleted(compared):
    def step(s, k, tape):
        with tape():
            s.w.grad = None
            (s.w * s.w * k).sum().backward()
            grad = s.w.grad
            s.w.grad = grad * 2
            s.w.grad.add_(1)
            print(s.w.grad, s.w.grad is grad)
            if k % 3 == 2:
                s.w.grad = None
            elif k % 3 == 1:
                s.w.grad = grad
            else:
                del s.w.grad
            s.log.append(grad)

    compared(weights("w"), step, 12)


def test_one_tensor_is_the_gradient_of_two_leaves():
    def step(s, k, tape):
        with tape():
            s.a.grad = s.b.grad = None
            (s.a * s.b * k).sum().backward()
            s.b.grad = s.a.grad
            s.a.grad.mul_(2)
            print(s.b.grad)

    compare(weights("a", "b"), step, 8)


def test_parameters_frozen_and_thawed_between_iterations(compared):
    def step(s, k, tape):
        s.model.bias.requires_grad_(not 5 <= k < 9)
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    assert coexecuted(compared(linear, step, 13), 7)


def test_the_model_and_a_captured_tensor_are_replaced(compared):
    def make():
        s = linear()
        s.scale = torch.randn(4)
        return s

    def step(s, k, tape):
        if k == 5:
            s._old, s.scale = s.scale, torch.randn(4)
        if k == 8:
            s.scale = torch.randn(4)
        if k == 11:
            new = linear()
            s.model, s.optimizer = new.model, new.optimizer
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x * s.scale).pow(2).mean())

    assert coexecuted(compared(make, step, 16), 8)


def test_batch_norm_switches_and_dropout_is_off_at_some_steps(compared):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        return SimpleNamespace(model=model, optimizer=optim.Adam(model.parameters()))

    def step(s, k, tape):
        s.model.train(k % 4 != 3)
        s.model[2].p = 0.0 if k in (6, 9) else 0.3
        x = torch.randn(6, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    assert coexecuted(compared(make, step, 14), 7)


def test_parametrized_layers_update_their_buffers_in_the_forward_pass(compared):
    parametrizations = nn.utils.parametrizations

    def make():
        model = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(4, 4)), parametrizations.weight_norm(nn.Linear(4, 4))
        )
        return SimpleNamespace(model=model, optimizer=optim.SGD(model.parameters(), lr=0.1))

    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    assert coexecuted(compared(make, step, 8), 5)


def test_clipping_an_average_and_a_scaler(compared):
    def make():
        s = linear()
        s.average = optim.swa_utils.AveragedModel(s.model)
        s._scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return s

    def step(s, k, tape):
        x = torch.randn(5, 4) * (float("inf") if k == 7 else 1)
        with tape():
            s.optimizer.zero_grad()
            s._scaler.scale(s.model(x).pow(2).mean()).backward()
            s._scaler.unscale_(s.optimizer)
            print(f"{nn.utils.clip_grad_norm_(s.model.parameters(), 0.1):.4f}")
            s._scaler.step(s.optimizer)
            s._scaler.update()
            s.average.update_parameters(s.model)

    assert coexecuted(compared(make, step, 12), 5)


def test_a_recurrent_network_carries_its_state(compared):
    def make():
        return SimpleNamespace(model=nn.LSTM(3, 4), h=None)

    def step(s, k, tape):
        x = torch.randn(5, 2, 3)
        with tape():
            s.model.zero_grad()
            y, h = s.model(x, s.h)
            y.pow(2).mean().backward()
            s.h = tuple(t.detach() for t in h)
            del y, h
            with torch.no_grad():
                for p in s.model.parameters():
                    p -= 0.1 * p.grad

    compared(make, step, 10)


def test_a_recurrent_network_is_coexecuted():
    def step(s, k, tape):
        x = torch.randn(5, 2, 3)
        with tape():
            s.model.zero_grad()
            y, _ = s.model(x)
            y.pow(2).mean().backward()
            del y, _

    assert coexecuted(compare(lambda: SimpleNamespace(model=nn.LSTM(3, 4)), step, 6))


def test_complex_parameters_train(compared):
    def make():
        return SimpleNamespace(w=torch.randn(3, dtype=torch.complex64, requires_grad=True))

    def step(s, k, tape):
        x = torch.randn(3, dtype=torch.complex64)
        with tape():
            s.w.grad = None
            loss = (s.w * x - 1).abs().pow(2).sum()
            loss.backward()
            with torch.no_grad():
                s.w -= 0.1 * s.w.grad
            print(s.w, s.w.grad)
        return loss.detach()

    assert coexecuted(compared(make, step, 8), 5)


def test_paths_through_random_branches_are_merged(compared_on_the_graph, patient):
    def step(s, k, tape):
        x, coin = torch.randn(5, 4), random.Random(k)
        with tape():
            h = s.model(x)
            if coin.random() < 0.5:
                h = h * 2
            if coin.random() < 0.5:
                h = h + 1
                print(h.mean().detach())
            if coin.random() < 0.5:
                h = h.relu()
            train(s, h.pow(2).mean())

    assert coexecuted(compared_on_the_graph(linear, step, 24), 10)


def test_training_in_an_inner_loop_of_varying_length(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            for _ in range(1 + k % 3):
                loss = s.model(x).pow(2).mean()
                train(s, loss)
            print(loss)

    assert coexecuted(compared(linear, step, 14), 7)


@pytest.mark.parametrize("way", ["requires_grad_", "setter", "detach_", "in place"])
def test_requires_grad_changed_by_a_call_is_seen_by_python(way):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = (s.w * x) if way == "detach_" else x * 2
            if way == "requires_grad_":
                y.requires_grad_()
            elif way == "setter":
                y.requires_grad = True
            elif way == "detach_":
                y.detach_()
            else:
                y.mul_(s.w)
            print(y.requires_grad, y.is_leaf)
            loss = (y * s.w).sum()
            torch.autograd.grad(loss, [s.w])
        return y.detach()

    compare(weights("w"), step, 6)


# --- hooks and user code -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "tensor",
        "post accumulate",
        "forward",
        "full backward",
    ],
)
def test_hooks_added_and_removed_between_iterations(kind):
    def step(s, k, tape):
        model, log = s.model[1], s.log
        if k == 5 and kind == "tensor":
            s._hook = model.weight.register_hook(lambda g: g * 2)
        elif k == 5 and kind == "post accumulate":
            s._hook = model.weight.register_post_accumulate_grad_hook(
                lambda p: log.append(p.grad.sum().item())
            )
        elif k == 5 and kind == "forward":
            s._hook = model.register_forward_hook(lambda m, i, o: log.append(o.sum().item()))
        elif k == 5:
            s._hook = model.register_full_backward_hook(lambda m, i, o: log.append(o[0].sum().item()))
        if k == 7:
            s._hook.remove()
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).pow(2).mean())

    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return SimpleNamespace(model=model, optimizer=optim.SGD(model.parameters(), lr=0.1), log=[])

    compare(make, step, 12)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


@pytest.mark.parametrize(
    "first",
    [
        0,
        5,
    ],
)
def test_a_custom_function_is_applied_from_some_step_on(first):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            h = Square.apply(h) if k >= first else h.pow(2)
            train(s, h.mean())

    compare(linear, step, 10)


def test_a_checkpointed_layer_from_some_step_on(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = checkpoint(s.model, x, use_reentrant=False) if k >= 5 else s.model(x)
            train(s, h.pow(2).mean())

    compared(linear, step, 10)


@pytest.mark.parametrize("first", [0, 5])
def test_saved_tensor_hooks_are_called(compared, first):
    def step(s, k, tape):
        x = torch.randn(3, requires_grad=True)

        def pack(tensor):
            s.log.append(k)
            return tensor

        with tape():
            if k >= first:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    y = (x * x).sum()
            else:
                y = (x * x).sum()
            y.backward()
        return x.grad

    compared(nothing, step, 9)


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="PyTorch 2.14 has them")
@pytest.mark.parametrize("around", [False, True], ids=["in the block", "around it"])
@pytest.mark.parametrize("first", [0, 5])
def test_hooks_on_new_nodes_are_called(compared, first, around):
    def step(s, k, tape):
        x = torch.randn(3, requires_grad=True)

        def hooked():
            hooks = k >= first
            hook = torch.autograd.graph.node_creation_hook if hooks else nullcontext
            return hook(lambda node: s.log.append(node.name()))

        with hooked() if around else nullcontext(), tape():
            with nullcontext() if around else hooked():
                y = Twice.apply(x * x).sum()
            y.backward()
        return x.grad

    compared(nothing, step, 9)


def test_functional_transforms(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = torch.func.vmap(lambda row: row * 2 + 1)(x)
            z = torch.func.grad(lambda t: (t**2).sum())(x)
        return y, z

    compared(nothing, step, 6)


# --- what remains after the block ----------------------------------------------------------------


def test_a_graph_retained_by_position_is_used_after_the_block(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            loss.backward(None, True)
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()

    compared(linear, step, 8)


def test_history_that_outlives_the_block_is_right(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
        train(s, loss)
        return loss

    compared(linear, step, 8)


def test_history_from_before_the_block_is_right(compared):
    def step(s, k, tape):
        h = s.model(torch.randn(5, 4))
        with tape():
            train(s, h.pow(2).mean())

    compared(linear, step, 8)


def test_a_base_that_is_written_through_its_views():
    """Each write gives the base another node, though no call was made on it."""

    def loss_of(s, x):
        grid = torch.zeros(6, 6)
        grid[:, :3] = s.model(x)
        left, right = grid[:, :3], grid[:, 3:]
        left.t().mul_(1.5)
        right.add_(left.detach())
        grid.view(-1)[::7] += 1.0
        s.kept = grid.detach()
        return (grid @ grid).square().mean()

    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            train(s, loss_of(s, x))

    assert coexecuted(compare(linear, step, 12), 6)


@pytest.mark.parametrize("shown", ["before", "behind", "never"])
def test_a_kept_base_that_is_written_through_a_view_shows_the_node_of_its_last_write(shown):
    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            h = s.model(x) * 2
            if shown == "before":
                s.log.append(repr(h))
            h[1:].mul_(3)
            if shown == "behind":
                s.log.append(repr(h))
            train(s, h.square().mean())
            s.kept = h

    compare(linear, step, 12)
