"""Updates of optimizers are one event each, with the numbers that eager's Python computes."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import optim

import coexec
from coexec.tracegraph.optimizers import FUNCTIONALS, ORIGINALS, Update
from tests.coexec.harness import coexecuted, compare, train

ONE_EVENT = {
    "SGD": ("sgd", lambda p: optim.SGD(p, lr=0.1)),
    "SGD with momentum": ("sgd", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3)),
    "Nesterov": ("sgd", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "SGD foreach": ("sgd", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)),
    "SGD fused": ("sgd", lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "Adam": ("adam", lambda p: optim.Adam(p, lr=0.01)),
    "Adam that maximizes": ("adam", lambda p: optim.Adam(p, lr=0.01, maximize=True, weight_decay=0.1)),
    "Adam foreach": ("adam", lambda p: optim.Adam(p, lr=0.01, foreach=True)),
    "Adam fused": ("adam", lambda p: optim.Adam(p, lr=0.01, fused=True)),
    "AMSGrad": ("adam", lambda p: optim.Adam(p, lr=0.01, amsgrad=True)),
    "AdamW": ("adam", lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    "Adagrad": ("adagrad", lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1)),
    "RMSprop": ("rmsprop", lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5)),
}


def regression(make_optimizer):
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = make_optimizer(model.parameters())
        return SimpleNamespace(model=model, optimizer=optimizer, scheduler=None, log=[])

    return make


def step(s, k, tape):
    x = torch.randn(6, 4)
    with tape():
        train(s, (s.model(x) - x.sum(1, keepdim=True)).square().mean())


def events(report):
    return Counter(n.name.rpartition(".")[2] for n in report.graph.nodes)


@pytest.mark.parametrize("name", ONE_EVENT)
def test_a_step_of_an_optimizer_is_one_event(name):
    functional, make_optimizer = ONE_EVENT[name]

    report = compare(regression(make_optimizer), step, 9)

    assert coexecuted(report, 5)
    assert report.fallbacks == 0, report.summary()
    assert events(report)[functional] == 1
    assert f"= optim.{functional}.{functional}(" in report.graph_text
    assert "loop make" not in report.graph_text
    assert not {"lerp_", "addcdiv_", "addcmul_", "sqrt", "item"} & set(events(report))


def test_an_update_that_reads_other_tensors_is_not_one_event():
    report = compare(regression(lambda p: optim.Adam(p, lr=torch.tensor(0.01))), step, 9)

    assert report.graph is None or "adam" not in events(report)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: optim.lr_scheduler.LambdaLR(o, lambda k: min(1.0, k / 4)),
        lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    ],
)
@pytest.mark.parametrize("name", ["SGD with momentum", "Adam", "AdamW"])
def test_learning_rates_and_momenta_that_change_are_fed(schedule, name):
    def make():
        s = regression(ONE_EVENT[name][1])()
        s.scheduler = schedule(s.optimizer)
        return s

    def scheduled(s, k, tape):
        step(s, k, tape)
        s.scheduler.step()

    assert coexecuted(compare(make, scheduled, 24), 14)


@pytest.mark.parametrize("name", ["Adam", "AMSGrad", "AdamW", "Adagrad"])
def test_counters_that_are_set_back_after_their_corrections_have_vanished(name):
    def make():
        s = regression(ONE_EVENT[name][1])()
        torch.nn.functional.mse_loss(s.model(torch.ones(1, 4)), torch.zeros(1, 1)).backward()
        s.optimizer.step()
        s.fresh = copy.deepcopy(s.optimizer.state_dict())
        for state in s.optimizer.state.values():
            state["step"].fill_(100_000)
        return s

    def set_back(s, k, tape):
        if k == 7:
            s.optimizer.load_state_dict(copy.deepcopy(s.fresh))
        step(s, k, tape)

    compare(make, set_back, 16)


def test_counters_that_differ_between_parameters():
    def make():
        s = regression(ONE_EVENT["Adam"][1])()
        s.model[2].weight.requires_grad_(False)
        return s

    def thawed(s, k, tape):
        if k == 2:
            s.model[2].weight.requires_grad_(True)
        step(s, k, tape)

    report = compare(make, thawed, 14)

    assert coexecuted(report, 5)
    assert events(report)["adam"] >= 4  # the parameters of one update changed, and it fell apart


def test_optimizers_that_take_turns_keep_their_parameters_together():
    def make():
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        return SimpleNamespace(layers=layers, optimizers=[optim.Adam(layer.parameters()) for layer in layers])

    def both(s, k, tape):
        x = torch.randn(3, 4)
        with tape():
            for layer, optimizer in zip(s.layers, s.optimizers, strict=True):
                optimizer.zero_grad()
                layer(x).square().mean().backward()
                optimizer.step()

    report = compare(make, both, 9)

    assert coexecuted(report, 5)
    assert events(report)["adam"] == 2


def test_parameters_without_a_gradient_now_and_then_need_no_trace_for_each_set():
    def make():
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        return SimpleNamespace(model=layers, optimizer=optim.Adam(layers.parameters(), lr=0.01))

    used = [s for n in (2, 3) for s in itertools.combinations(range(4), n)]

    def dropped(s, k, tape):
        x = torch.randn(5, 3)
        with tape():
            for i in used[k % len(used)]:
                x = x + s.model[i](x).tanh()
            train(s, x.square().mean())

    report = compare(make, dropped, 40)

    assert report.traces < len(used), report.summary()


def test_an_optimizer_of_complex_parameters():
    def make():
        w = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        return SimpleNamespace(w=w, optimizer=optim.Adam([w], lr=0.01, amsgrad=True))

    def turned(s, k, tape):
        with tape():
            train(s, (s.w * torch.randn(3)).abs().sum())

    compare(make, turned, 9)


def test_a_number_that_nothing_explains_ends_the_trust_in_a_functional_form(monkeypatch):
    numbers = Update.numbers

    def wrong(self, arguments, counts):
        return (0.25, 0.75), numbers(self, arguments, counts)[1]

    monkeypatch.setattr(Update, "numbers", wrong)

    report = compare(regression(ONE_EVENT["Adam"][1]), step, 12)

    assert [c.id for c in report.causes] == ["CX0106"]
    assert coexecuted(report, 5)
    assert "adam" not in events(report)


@pytest.mark.parametrize("functional", FUNCTIONALS, ids=lambda f: f.name)
def test_functional_forms_have_the_parameters_that_are_relied_on(functional):
    update = Update(functional)

    assert set(functional.lists) < update._required
    assert set(functional.lists) < set(update._positional)
    assert ("state_steps" in functional.lists) >= (functional.derived is not None)


def test_a_block_leaves_the_functional_forms_as_they_were():
    compare(regression(ONE_EVENT["SGD"][1]), step, 4)

    for functional, original in ORIGINALS.items():
        assert getattr(importlib.import_module(functional.module), functional.name) is original


# --- counters -------------------------------------------------------------------------------------


def with_counters(change, optimizer="Adam"):
    """A step before which `change(k, states)` may do something to the optimizer's state."""

    def changed(s, k, tape):
        change(k, list(s.optimizer.state.values()))
        step(s, k, tape)

    return regression(ONE_EVENT[optimizer][1]), changed


@pytest.mark.parametrize("optimizer", ["Adam", "Adam foreach", "Adagrad"])
def test_counters_may_become_equal_to_others(optimizer):
    def change(k, states):
        if k == 2:
            states[2]["step"].fill_(40.0)
        if k == 10:
            states[1]["step"].copy_(states[2]["step"])

    compare(*with_counters(change, optimizer), 16)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1),
        torch.tensor(246.0, dtype=torch.bfloat16),
        torch.tensor(246, dtype=torch.uint8),
        torch.tensor(2.0**24 - 3),
        torch.tensor(float("inf")),
        torch.tensor([3.0]),
        torch.tensor(7.0, dtype=torch.float64),
    ],
    ids=str,
)
def test_counters_of_any_kind_give_the_numbers_of_eager(value):
    def change(k, states):
        if k in (2, 9):
            for state in states:
                state["step"] = value.clone()

    compare(*with_counters(change), 22)


def test_parameters_that_share_a_counter():
    def change(k, states):
        if k == 3:
            states[1]["step"] = states[0]["step"]

    compare(*with_counters(change), 10)


# --- what the user does to the functional forms ------------------------------------------------------


class Halved(torch.overrides.TorchFunctionMode):
    """Halves the updates of Adam."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.addcdiv_:
            kwargs["value"] *= 0.5
        return function(*args, **kwargs)


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Halved, Counted])
def test_modes_of_the_user_see_the_calls_that_they_would_see(mode):
    def watched(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            s.optimizer.zero_grad()
            s.model(x).square().mean().backward()
            with mode() as entered:
                s.optimizer.step()
        print(getattr(entered, "operations", ""))

    compare(regression(ONE_EVENT["Adam"][1]), watched, 8)


def test_a_functional_form_that_the_user_has_replaced_is_the_users(monkeypatch):
    calls = []
    module = importlib.import_module("torch.optim.adam")
    real = module.adam

    def mine(*args, **kwargs):
        calls.append(len(args))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "adam", mine)

    compare(regression(ONE_EVENT["Adam"][1]), step, 6)

    assert len(calls) == 12
    assert module.adam is mine


def test_a_functional_form_that_the_user_replaces_in_the_block_stays_replaced(monkeypatch):
    module = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(module, "adam", module.adam)  # to be put back
    mine = functools.partial(module.adam)

    def replaced(s, k, tape):
        with tape():
            module.adam = mine

    compare(regression(ONE_EVENT["Adam"][1]), replaced, 1)

    assert module.adam is mine


def test_a_stand_in_that_the_user_has_kept_is_the_functional_form(monkeypatch):
    module = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(module, "adam", module.adam)  # to be put back
    with coexec.GradientTape():
        module.adam = module.adam

    compare(regression(ONE_EVENT["Adam"][1]), step, 8)


def called(function, *args, **kwargs):
    def direct(s, k, tape):
        with tape():
            s.optimizer.zero_grad()
            s.model(torch.randn(6, 4)).square().mean().backward()
            with torch.no_grad():
                parameters = list(s.model.parameters())
                function(parameters, [p.grad for p in parameters], *args, **kwargs)

    return direct


KEYWORDS = {"weight_decay": 0.0, "lr": 0.1, "nesterov": False, "maximize": False}
DIRECT = {
    "nothing": lambda p, g: optim.sgd.sgd(),
    "a keyword is missing": lambda p, g: optim.sgd.sgd(p, g, [], dampening=0.0, **KEYWORDS),
    "keywords by position": lambda p, g: optim.sgd.sgd(
        p, g, [], False, None, None, None, None, 0, 0, 0.1, 0, 0, 0
    ),
    "given twice": lambda p, g: optim.sgd.sgd(p, g, [], params=p, momentum=0.0, dampening=0.0, **KEYWORDS),
    "unknown": lambda p, g: optim.sgd.sgd(p, g, [], momentum=0.0, dampening=0.0, magic=1, **KEYWORDS),
    "no rate": lambda p, g: optim.sgd.sgd(p, g, [], momentum=0.0, dampening=0.0, **{**KEYWORDS, "lr": None}),
    "tuples": lambda p, g: optim.sgd.sgd(tuple(p), tuple(g), [], momentum=0.0, dampening=0.0, **KEYWORDS),
    "a generator": lambda p, g: optim.sgd.sgd(
        (x for x in p), g, [], foreach=False, fused=False, momentum=0.0, dampening=0.0, **KEYWORDS
    ),
    "too few": lambda p, g: optim.sgd.sgd(p, g[:1], [], momentum=0.0, dampening=0.0, **KEYWORDS),
    "none": lambda p, g: optim.sgd.sgd([], [], [], momentum=0.0, dampening=0.0, **KEYWORDS),
    "a large integer": lambda p, g: optim.sgd.sgd(p, g, [], momentum=0.0, dampening=10**400, **KEYWORDS),
}


@pytest.mark.parametrize("how", DIRECT)
def test_direct_calls_do_and_raise_what_eager_does(how):
    compare(regression(ONE_EVENT["SGD"][1]), called(DIRECT[how]), 6)


def test_what_follows_the_first_update_may_follow_later_ones():
    def logged(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            loss = s.model(x).square().mean()
            train(s, loss)
            if k % 6 == 0:  # the first update makes the momentum buffers
                s.log.append(loss.item())

    report = compare(regression(ONE_EVENT["SGD with momentum"][1]), logged, 16)

    assert report.fallbacks == 0, report.summary()
    assert coexecuted(report, 11)
