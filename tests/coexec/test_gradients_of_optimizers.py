"""What optimizers do to gradients in one go has the effects of one call after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

import coexec
from tests.coexec.harness import coexecuted, compare, train

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def with_head(make_optimizer):
    """A model with a part that is never used."""

    def make():
        model = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 1), "idle": nn.Linear(2, 2)})
        optimizer = make_optimizer(model.parameters())
        return SimpleNamespace(model=model, optimizer=optimizer, scheduler=None, log=[])

    return make


def loss_of(s):
    x = torch.randn(6, 4)
    body = s.model["body"](x).tanh()
    return (s.model["head"](body) - x.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_what_python_sees_between_the_calls(name):
    def step(s, k, tape):
        with tape():
            seen = []
            s.optimizer.zero_grad()
            seen.append([p.grad is None for p in s.model.parameters()])
            loss_of(s).backward()
            seen.append([p.grad is None for p in s.model.parameters()])
            s.optimizer.step()
            total = s.model["body"].weight.grad.sum()
            s.optimizer.zero_grad()
            seen.append([p.grad is None for p in s.model.parameters()])
        s.log += [str(seen), total.item()]

    report = compare(with_head(OPTIMIZERS[name]), step, 24)

    assert report.steps["co-execution"] >= 4, report.summary()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_kept_are_added_to(to_none):
    def step(s, k, tape):
        with tape():
            if k % 2 == 0:
                s.optimizer.zero_grad(set_to_none=to_none)
            loss_of(s).backward()
            if k % 2:
                s.optimizer.step()
        s.log.append([None if p.grad is None else p.grad.sum().item() for p in s.model.parameters()])

    assert coexecuted(compare(with_head(OPTIMIZERS["Adam"]), step, 14), 4)


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_an_exception_leaves_the_gradients_of_eager_execution(place):
    class Stop(Exception):
        pass

    def step(s, k, tape):
        try:
            with tape():
                s.optimizer.zero_grad()
                if k == 7 and place == "before":
                    raise Stop
                loss_of(s).backward()
                if k == 7 and place == "between":
                    raise Stop
                s.optimizer.step()
                if k == 7 and place == "after":
                    raise Stop
        except Stop:
            s.log.append([None if p.grad is None else p.grad.sum().item() for p in s.model.parameters()])

    assert coexecuted(compare(with_head(OPTIMIZERS["Adam"]), step, 10), 4)


VARIANTS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with weight decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "AMSGrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam, maximizing": lambda p: optim.Adam(p, lr=0.01, maximize=True, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "RMSprop, centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True),
    "lr in a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_groups_are_collected_as_the_options_say(name):
    def step(s, k, tape):
        with tape():
            train(s, loss_of(s))

    assert coexecuted(compare(with_head(VARIANTS[name]), step, 10), 4)


def changed_option(s):
    s.optimizer.param_groups[0]["momentum"] = 0.0


def reloaded(s):
    s.optimizer.load_state_dict(s.optimizer.state_dict())


def state_of_another(s):
    states = list(s.optimizer.state.values())
    states[0]["momentum_buffer"] = states[0]["momentum_buffer"].clone().mul_(2)


def state_lost(s):
    s.optimizer.state.clear()


def parameter_added(s):
    s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 0.3})


def parameters_changed_order(s):
    s.optimizer.param_groups[0]["params"].reverse()


def gradient_from_outside(s):
    s.model["idle"].weight.grad = torch.ones(2, 2)


CHANGES = (
    changed_option,
    reloaded,
    state_of_another,
    state_lost,
    parameter_added,
    parameters_changed_order,
    gradient_from_outside,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_was_collected_before_is_not_what_is_collected_after_a_change(change):
    def step(s, k, tape):
        if k == 9:
            change(s)
        with tape():
            if k != 9:
                s.optimizer.zero_grad()
            loss_of(s).backward()
            s.optimizer.step()

    assert coexecuted(compare(with_head(OPTIMIZERS["SGD"]), step, 20), 4)


def test_a_sparse_gradient_is_refused_as_in_eager_execution():
    def step(s, k, tape):
        if k == 9:
            s.model["idle"].weight.grad = torch.ones(2, 2).to_sparse()
        with tape():
            loss_of(s).backward()
            try:
                s.optimizer.step()
            except RuntimeError as error:
                s.log.append(str(error))
                s.model["idle"].weight.grad = None
            s.optimizer.zero_grad()

    assert coexecuted(compare(with_head(OPTIMIZERS["Adam"]), step, 14), 4)


def test_optimizers_of_one_class_that_keep_other_state_are_collected_apart():
    def make():
        a, b = nn.Linear(4, 8), nn.Linear(8, 1)
        first = optim.SGD(a.parameters(), lr=0.1, momentum=0.9)
        second = optim.SGD(b.parameters(), lr=0.1, momentum=-0.0)
        return SimpleNamespace(a=a, b=b, optimizers=[first, second], log=[])

    def step(s, k, tape):
        with tape():
            s.b(s.a(torch.randn(6, 4)).tanh()).square().mean().backward()
            for optimizer in s.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert coexecuted(compare(make, step, 10), 4)


class Broken(optim.Adam):
    """Its state is lost before one step, and found after it."""

    lost = None

    def lose(self):
        self.lost = [state.pop("exp_avg") for state in self.state.values()]

    def find(self):
        for state, average in zip(self.state.values(), self.lost, strict=True):
            state["exp_avg"] = average


def test_an_optimizer_that_fails_puts_the_gradients_back():
    def step(s, k, tape):
        if k == 6:
            s.optimizer.lose()
        if k == 7:
            s.optimizer.find()
        try:
            with tape():
                train(s, loss_of(s))
        except KeyError as error:
            s.log += [
                str(error),
                [None if p.grad is None else p.grad.sum().item() for p in s.model.parameters()],
            ]

    assert coexecuted(compare(with_head(lambda p: Broken(p, lr=0.01)), step, 12), 6)


class Counting(optim.SGD):
    """Has its own way of forgetting gradients."""

    forgotten = 0

    def zero_grad(self, set_to_none=True):
        self.forgotten += 1
        self.param_groups[0]["params"][0].grad = None
        super().zero_grad(set_to_none)


def test_an_optimizer_with_its_own_way_of_forgetting_keeps_it():
    def step(s, k, tape):
        with tape():
            train(s, loss_of(s))
        s.log.append(s.optimizer.forgotten)

    assert coexecuted(compare(with_head(lambda p: Counting(p, lr=0.1)), step, 8), 4)


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizers_are_as_they_were_after_a_block(compiled):
    if compiled:  # Dynamo then puts its own functions in the places of theirs
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

    def methods():
        classes = (optim.Adam, optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad)
        return (optim.Optimizer.zero_grad, *(c._init_group for c in classes))

    before = methods()
    s = with_head(OPTIMIZERS["Adam"])()
    for _ in range(4):
        with coexec.GradientTape():
            train(s, loss_of(s))
            assert not any(a is b for a, b in zip(methods(), before, strict=True))
    assert methods() == before


def test_a_method_that_the_user_has_replaced_is_the_users(monkeypatch):
    calls = []
    original = optim.Optimizer.zero_grad

    def mine(self, set_to_none=True):
        calls.append(set_to_none)
        return original(self, set_to_none)

    monkeypatch.setattr(optim.Optimizer, "zero_grad", mine)
    s = with_head(OPTIMIZERS["Adam"])()
    for _ in range(5):
        with coexec.GradientTape():
            train(s, loss_of(s))
    assert len(calls) == 5


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("way", ["first", "last", "dropped"])
def test_a_gradient_of_several_tensors_is_one_object(way, kept, synchronous):
    def make():
        p, q = (nn.Parameter(torch.zeros(5, 3)) for _ in range(2))
        return SimpleNamespace(model=nn.Linear(4, 3), p=p, q=q, log=[])

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            z = s.model(x).detach().requires_grad_()  # a leaf that the graph makes
            z.square().sum().backward()
            if way == "last":
                s.q.grad = z.grad
                s.p.grad = s.q.grad
            else:
                s.p.grad = z.grad
                s.q.grad = s.p.grad
            if way == "dropped":
                z.grad = None
            held = (z, z.grad) if kept else None
            del z
        seen = [s.p.grad is s.q.grad, s.p.grad.sum().item()]
        if held is not None:
            leaf, gradient = held
            seen += [leaf.grad is s.p.grad, gradient is leaf.grad, leaf.grad is None]
        return seen

    assert coexecuted(compare(make, step, 8, synchronous=synchronous), 4)
