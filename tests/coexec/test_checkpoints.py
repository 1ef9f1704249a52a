"""Activation checkpoints, and random state that a block sees and sets, are co-executed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from coexec._native import core
from tests.coexec.harness import checkpoints, coexecuted, compare, linear, train, weights
from tests.coexec.test_callbacks import WAYS, Exp, Swish

pytestmark = pytest.mark.skipif(core is None, reason="the operations on random state are native")


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        h = self.one(self.norm(x)).relu()
        if self.kind == "dropout":
            h = F.dropout(h, 0.3)
        elif self.kind == "custom function":
            h = Exp.apply(Swish.apply(h) * 0.1)
        elif self.kind == "prints":
            print("runs", self.calls)
        elif self.kind == "looks":
            h = h * 0.5 if h.mean().item() > 0.2 else h
        elif self.kind == "in place":
            h = (h * 0.5).add_(1)
        return x + self.two(h).tanh() * scale


def _make(kind, layers=2):
    def make():
        state = linear()
        state.model = nn.Sequential(*[Block(kind) for _ in range(layers)])
        state.optimizer = torch.optim.SGD(state.model.parameters(), 0.1)
        return state

    return make


USES = {
    "each layer": lambda m, x: [x := checkpoint(layer, x, use_reentrant=False) for layer in m][-1],
    "one layer": lambda m, x: m[1](checkpoint(m[0], x, use_reentrant=False)),
    "with an argument": lambda m, x: (
        checkpoint(m[0], x, 0.5, use_reentrant=False) + checkpoint(m[1], x, scale=0.3, use_reentrant=False)
    ),
    "without random state": lambda m, x: m[1](
        checkpoint(m[0], x, use_reentrant=False, preserve_rng_state=False)
    ),
    "nested": lambda m, x: checkpoint(
        lambda y: m[1](checkpoint(m[0], y, use_reentrant=False)).sin(), x, use_reentrant=False
    ),
    "a sequence": lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(m[0], x.requires_grad_(), use_reentrant=True),
}


@checkpoints
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "dropout", "custom function", "prints", "looks", "in place"])
@pytest.mark.parametrize("use", USES)
def test_checkpoints_are_co_executed(use, kind, options):
    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            loss = USES[use](s.model, x).square().mean()
            train(s, loss)
            s.log.append(loss.detach())

    report = compare(_make(kind), step, 12, **options)
    if use != "reentrant" and kind != "custom function":
        coexecuted(report, 5)


@checkpoints
@pytest.mark.parametrize("early", [True, False])
def test_a_function_runs_as_far_as_in_eager(early):
    def step(s, k, tape):
        def layer(x):
            y = s.model(x).tanh()
            print("behind the last that is saved")
            return y + 1

        x = torch.randn(6, 4)
        with tape(), set_checkpoint_early_stop(early):
            train(s, checkpoint(layer, x, use_reentrant=False).mean())

    coexecuted(compare(linear, step, 10), 6)


@checkpoints
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("place", ["region", "again", "behind", "at the end", "no checkpoint"])
def test_an_iteration_with_checkpoints_falls_back(place, options):
    def step(s, k, tape):
        other = place if k in (5, 8, 13) else ""
        runs = []

        def layer(x):
            runs.append(k)
            h = F.dropout(s.model[0](x), 0.2)
            if other == "region" or (other == "again" and len(runs) > 1):
                s.log.append(h.norm().item())
            return h.sin()

        x = torch.randn(6, 4)
        with tape():
            h = layer(x) if other == "no checkpoint" else checkpoint(layer, x, use_reentrant=False)
            y = checkpoint(s.model[1], h, use_reentrant=False)
            train(s, y.square().mean())
            if other == "behind":
                s.log.append(s.model[0].one.weight.norm().item())
            elif other == "at the end":
                s.log.append(y.detach())

    report = compare(_make("plain"), step, 18, **options)
    coexecuted(report, 6)
    assert report.fallbacks >= 1


@checkpoints
@pytest.mark.parametrize("again", [False, True])
def test_an_exception_in_a_checkpoint_leaves_the_state_that_eager_leaves(again):
    def step(s, k, tape):
        runs = []

        def layer(x):
            runs.append(k)
            h = s.model(x).tanh()
            if k in (1, 6, 8) and len(runs) == 1 + again:
                raise ValueError("not this one")
            return h.sin()

        x = torch.randn(6, 4)
        with tape():
            s.optimizer.zero_grad()
            checkpoint(layer, x, use_reentrant=False).mean().backward()
            s.optimizer.step()

    report = compare(linear, step, 12)
    assert report.steps.get("co-execution", 0) >= 2, report.summary()


@checkpoints
def test_another_function_the_second_time_is_the_error_that_it_is_in_eager():
    def step(s, k, tape):
        runs = []

        def layer(x):
            runs.append(k)
            h = s.model(x).tanh()
            if k == 7 and len(runs) > 1:
                h = h[:2]
            return h.sin()

        x = torch.randn(6, 4)
        with tape():
            s.optimizer.zero_grad()
            try:
                checkpoint(layer, x, use_reentrant=False).mean().backward()
            except RuntimeError as e:
                s.log.append(type(e).__name__)
            s.optimizer.step()

    compare(linear, step, 12)


@checkpoints
def test_a_checkpointed_graph_is_gone_through_twice():
    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            y = checkpoint(s.model, x, use_reentrant=False)
            y.square().mean().backward(retain_graph=True)
            train(s, y.mean())

    coexecuted(compare(linear, step, 10), 6)


@checkpoints
def test_a_checkpoint_without_gradients_runs_once():
    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            with torch.no_grad():
                s.log.append(checkpoint(s.model[0], x, use_reentrant=False).mean())
            train(s, checkpoint(s.model[0], x, use_reentrant=False).mean())

    coexecuted(compare(_make("dropout"), step, 10), 6)


@checkpoints
def test_a_checkpoint_under_autocast():
    def step(s, k, tape):
        x = torch.randn(6, 4)
        with tape():
            with torch.autocast("cpu", torch.bfloat16):
                y = checkpoint(s.model[0], x, use_reentrant=False)
            train(s, y.float().square().mean())

    coexecuted(compare(_make("plain"), step, 10), 6)


@checkpoints
def test_a_backward_pass_of_a_checkpoint_behind_the_block():
    def step(s, k, tape):
        x = torch.randn(6, 4)
        s.optimizer.zero_grad()
        with tape():
            loss = checkpoint(s.model, x, use_reentrant=False).mean()
        loss.backward()
        s.optimizer.step()

    compare(linear, step, 8)


# --- random state --------------------------------------------------------------------------------------


RANDOM = {
    "seen and set": lambda s, k: _repeated(s),
    "forked": lambda s, k: _forked(s, k),
    "seeded": lambda s, k: _seeded(k),
    "seeded with large numbers": lambda s, k: _seeded([2**64 - 1 - k, -k - 1, 2**63 + k][k % 3]),
    "kept": lambda s, k: setattr(s, "kept", torch.get_rng_state()),
    "of the step before": lambda s, k: _of_the_step_before(s),
    "looked at": lambda s, k: s.log.append(int(torch.get_rng_state().sum())),
    "written": lambda s, k: torch.set_rng_state(torch.get_rng_state().clone()),
}


def _seeded(number):
    assert torch.manual_seed(number) is torch.default_generator


def _repeated(s):
    state = torch.get_rng_state()
    one = torch.rand(3)
    torch.set_rng_state(state)
    s.log.append(torch.equal(one, torch.rand(3)))


def _forked(s, k):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + k)
        s.log.append(torch.randn(3))


def _of_the_step_before(s):
    if hasattr(s, "kept"):
        torch.set_rng_state(s.kept)
    s.log.append(torch.randn(2))
    s.kept = torch.get_rng_state()


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", RANDOM)
def test_random_state_is_seen_and_set_in_the_order_of_draws(name, options):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = F.dropout(s.model(x), 0.5)
            RANDOM[name](s, k)
            train(s, (y + torch.randn_like(y)).square().mean())

    coexecuted(compare(linear, step, 14, **options), 6)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_random_state_is_put_back_when_an_iteration_falls_back(options):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = F.dropout(s.model(x), 0.5)
            state = torch.get_rng_state()
            torch.manual_seed(k)
            y = y * torch.rand(())
            torch.set_rng_state(state)
            if k in (5, 9):
                s.log.append(y.norm().item())
            train(s, (y + torch.randn_like(y)).square().mean())

    report = compare(linear, step, 14, **options)
    coexecuted(report, 5)
    assert report.fallbacks


@pytest.mark.parametrize("seed", ["text", 2**64, -(2**63) - 1, 0.5, None])
def test_a_seed_that_is_none_is_the_error_that_it_is_in_eager(seed):
    def step(s, k, tape):
        with tape():
            s.a.grad = None
            s.a.square().sum().backward()
            if k == 6:
                torch.manual_seed(seed)

    compare(weights("a"), step, 10)


def test_a_model_is_evaluated_with_a_seed_of_its_own():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, F.dropout(s.model(x), 0.5).square().mean())
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                twin = copy.copy(s.model)
                s.log.append(twin(torch.randn(2, 4)).sum().item())

    coexecuted(compare(linear, step, 12), 6)


# --- found by trying to break it ------------------------------------------------------------------------


@checkpoints
@pytest.mark.parametrize("preserve", [True, False])
def test_a_call_that_reads_a_mask_can_be_the_last_that_runs_again(preserve):
    def step(s, k, tape):
        def layer(x, mask):
            y = x * mask
            print("behind")
            return y

        mask = torch.rand(3) > 0.5
        with tape():
            s.a.grad = None
            y = checkpoint(layer, s.a, mask, use_reentrant=False, preserve_rng_state=preserve)
            y.sum().backward()

    coexecuted(compare(weights("a"), step, 12), 6)


@checkpoints
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_nothing_is_saved_in_another_way_behind_a_fallback(options):
    """The function has run again, and what follows in the backward pass is not in the graph."""

    def step(s, k, tape):
        x = torch.randn(6, 4)
        runs = []

        def layer(x):
            runs.append(k)
            h = s.model(x).tanh()
            if k in (5, 8) and len(runs) > 1:
                s.random = torch.get_rng_state()
            return h.sin()

        with tape():
            train(s, checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).mean())
        y = s.model(x)
        train(s, y.sin().mean())

    compare(linear, step, 12, **options)


@checkpoints
def test_whether_a_function_stops_early_is_looked_at_in_every_step():
    def step(s, k, tape):
        def layer(x):
            y = x.tanh()
            print("behind")
            return y + 1

        with tape(), set_checkpoint_early_stop(k not in (6, 9)):
            s.optimizer.zero_grad()
            checkpoint(layer, s.model.weight, use_reentrant=False).sum().backward()

    coexecuted(compare(linear, step, 14), 6)


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_state_that_a_block_has_seen_is_set_behind_it(options):
    def step(s, k, tape):
        with tape():
            s.log.append(torch.rand(2))
            state = torch.get_rng_state()
            s.a.grad = None
            (s.a * torch.rand(3)).sum().backward()
        torch.set_rng_state(state)
        s.log.append(torch.rand(2))

    coexecuted(compare(weights("a"), step, 12, every=4, **options), 6)
