from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.randomness import seeded
from pipeline.runtime.stage import StageRunner
from pipeline.runtime.weights import Weights


def runner(module: nn.Module, *, lr: float = 0.1) -> StageRunner:
    weights = Weights(
        module, torch.optim.SGD(module.parameters(), lr=lr) if list(module.parameters()) else None
    )
    return StageRunner(weights, lambda k: nullcontext(), torch.device("cpu"))


def module(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)
G = torch.linspace(1, 2, 32, dtype=torch.float64).view(8, 4)


def eager(modules: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of the input and of the parameters."""
    x = X.clone().requires_grad_()
    modules(x).backward(G)
    return x.grad, [p.grad for p in modules.parameters()]


def test_both_parts_of_backward_give_what_the_whole_gives():
    whole, parts = runner(module()), runner(module())
    expected, expected_parameters = eager(module())
    whole.forward(0, (X,), (), 0, again=False)
    parts.forward(0, (X,), (), 0, again=False)
    (from_whole,) = whole.backward(0, (G,))
    (from_parts,) = parts.backward_input(0, (G,))
    assert all(p.grad is None for p in parts.weights.parameters)
    parts.backward_weight(0)
    assert torch.equal(from_whole, expected)
    assert torch.equal(from_parts, expected)
    for a, b, c in zip(whole.weights.parameters, parts.weights.parameters, expected_parameters, strict=True):
        assert torch.equal(a.grad, c)
        assert torch.equal(b.grad, c)


def test_recomputation_gives_the_same_and_keeps_only_the_input():
    stage = runner(module())
    expected, expected_parameters = eager(module())
    stage.forward(0, (X.clone(),), (), 0, again=True)
    assert stage.nbytes == X.nbytes
    stage.recompute(0)
    (found,) = stage.backward(0, (G,))
    assert torch.equal(found, expected)
    assert all(
        torch.equal(p.grad, g) for p, g in zip(stage.weights.parameters, expected_parameters, strict=True)
    )
    assert stage.nbytes == 0


def test_recomputation_updates_running_statistics_once():
    plain, again = runner(nn.BatchNorm1d(6).double()), runner(nn.BatchNorm1d(6).double())
    plain.forward(0, (X,), (), 0, again=False)
    again.forward(0, (X,), (), 0, again=True)
    again.recompute(0)
    for a, b in zip(plain.weights.module.buffers(), again.weights.module.buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_trial_changes_nothing():
    stage = runner(nn.Sequential(nn.BatchNorm1d(6), nn.Dropout()).double())
    before = [b.clone() for b in stage.weights.module.buffers()]
    outputs, sizes = stage.trial((X,), ())
    assert outputs[0].shape == X.shape
    assert sum(sizes) > 0
    assert stage.nbytes == 0
    assert all(torch.equal(a, b) for a, b in zip(before, stage.weights.module.buffers(), strict=True))


class InPlaceFirst(nn.Module):
    """Starts by overwriting its input."""

    def forward(self, x):
        return x.relu_().exp()


def test_a_stage_may_overwrite_its_input():
    stage = runner(InPlaceFirst())
    (out,) = stage.forward(0, (X.clone(),), (), 0, again=False)
    (found,) = stage.backward(0, (torch.ones_like(X),))
    assert torch.equal(out, X.clamp(min=0).exp())
    assert torch.equal(found, torch.where(X > 0, X.exp(), 0.0))


def test_a_stage_that_overwrites_its_input_cannot_recompute_silently():
    stage = runner(InPlaceFirst())
    stage.forward(0, (X.clone(),), (), 0, again=True)
    with pytest.raises(InPlaceError, match="changed in place"):
        stage.recompute(0)


def test_an_update_between_forward_and_backward_is_an_error():
    stage = runner(module())
    stage.forward(0, (X,), (), 0, again=False)
    stage.forward(1, (X,), (), 0, again=False)
    stage.backward(0, (G,))
    stage.weights.update(1.0)
    with pytest.raises(RunError, match="version 0 of the weights is not here"):
        stage.backward(1, (G,))


def test_a_stashed_version_gives_its_own_gradients_before_and_after_the_update():
    stage = runner(module())
    expected, expected_parameters = eager(module())
    stage.forward(0, (X,), (), 0, again=False)
    stage.weights.parameters[0].grad = torch.ones_like(stage.weights.parameters[0])
    stage.weights.stash()
    stage.weights.update(1.0)
    stage.forward(1, (X,), (), 0, again=False)  # with the stashed version
    stage.forward(2, (X,), (), 1, again=False)  # with the newest
    for k in (0, 1):
        (found,) = stage.backward(k, (G,))
        assert torch.equal(found, expected)
    assert all(
        torch.equal(p.grad, g + g) for p, g in zip(stage.weights.parameters, expected_parameters, strict=True)
    )
    (other,) = stage.backward(2, (G,))
    assert not torch.equal(other, expected)


def test_versions_are_counted_in_bytes_and_let_go():
    weights = Weights(module(), None)
    one = weights.nbytes
    weights.stash()
    weights.update(1.0)
    assert (weights.nbytes, weights.versions) == (2 * one, (0, 1))
    weights.drop(0)
    assert (weights.nbytes, weights.versions, weights.frozen) == (one, (1,), {})


def test_a_version_that_is_not_there_is_an_error():
    with pytest.raises(RunError, match=r"version 3 of the weights is not here; \[0\] are"):
        with Weights(module(), None).using(3):
            pass


def test_a_pass_that_changes_a_stashed_version_is_an_error():
    weights = Weights(module(), None)
    weights.stash()
    weights.update(1.0)
    with pytest.raises(InPlaceError, match="changed version 0"):
        with weights.using(0), torch.no_grad():
            weights.parameters[0].add_(1)


def test_tied_parameters_count_once():
    tied = module()
    tied.add_module("again", tied[0])
    assert Weights(tied, None).nbytes == Weights(module(), None).nbytes


def test_random_numbers_depend_on_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(7):
        first = torch.rand(3)
    with seeded(7):
        second = torch.rand(3)
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)


def test_a_stage_must_give_tensors():
    with pytest.raises(RunError, match="its module gave a dict"):
        runner(type("Bad", (nn.Module,), {"forward": lambda self, x: {"x": x}})()).forward(
            0, (X,), (), 0, again=False
        )
