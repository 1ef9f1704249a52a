"""Values decide about shapes: Python is told the sizes before it goes on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import coexec
from tests.coexec.harness import coexecuted, compare, train
from tests.coexec.test_sizes import of_model

CHANCES = [0.5, 0.7, 0.3, 0.6, 0.4, 0.5]


def mask_of(k, n=24):
    mask = torch.rand(n) < CHANCES[k % len(CHANCES)]
    mask[:2] = True
    return mask


def masked_loss(model, x, mask):
    return model(x)[mask].square().mean()


def selected_loss(model, x, mask):
    return model(x).masked_select(mask[:, None]).abs().mean()


def assigned_loss(model, x, mask):
    h = model(x)
    y = h.clone()
    y[mask] = h[mask] * 2
    y[~mask] = y[~mask].tanh()
    return y.square().mean()


def found_loss(model, x, mask):
    h = model(x)
    rows = torch.nonzero((h.sum(1) > 0) | mask)[:, 0]
    return (h[rows] * rows[:, None]).mean()


def masked_values_loss(model, x, mask):
    """The mask is computed from what is differentiated."""
    h = model(x)
    hard = h[(h.detach().abs().sum(1) > 0.1) | mask]
    return F.layer_norm(hard, (3,)).std() + hard.mean()


def expanded_loss(model, x, mask):
    chosen = model(x)[mask]
    return (chosen @ chosen.t()).softmax(1).diagonal().sum() / len(chosen)


LOSSES = [masked_loss, selected_loss, assigned_loss, found_loss, masked_values_loss, expanded_loss]


@pytest.mark.parametrize("loss_of", LOSSES)
def test_training_equals_eager(loss_of):
    def step(s, k, tape):
        x, mask = torch.randn(24, 4), mask_of(k)
        with tape():
            loss = loss_of(s.model, x, mask)
            train(s, loss)
            s.log.append(loss.item())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 24)
    assert coexecuted(report, 12)


def test_python_sees_the_shape_of_this_iteration():
    def step(s, k, tape):
        x, mask = torch.randn(24, 4), mask_of(k)
        with tape():
            chosen = s.model(x)[mask]
            s.log.append((tuple(chosen.shape), len(chosen), chosen.stride(), chosen.numel()))
            print(chosen.shape)
            train(s, chosen.square().mean())

    assert coexecuted(compare(of_model(lambda: nn.Linear(4, 3)), step, 24), 12)


def test_a_branch_on_the_number_of_elements():
    def step(s, k, tape):
        x, mask = torch.randn(24, 4), mask_of(k)
        with tape():
            chosen = s.model(x)[mask]
            loss = chosen.square().mean()
            if len(chosen) > 12:
                loss = loss + chosen[:5].abs().sum()
                s.log.append("many")
            train(s, loss)

    compare(of_model(lambda: nn.Linear(4, 3)), step, 30)


@pytest.mark.parametrize("number", [0, 1])
def test_none_and_one_element_are_traced(number):
    def step(s, k, tape):
        x, mask = torch.randn(24, 4), mask_of(k)
        if k % 10 == 9:
            mask = torch.arange(24) < number
        with tape():
            loss = s.model(x)[mask].sum()
            s.log.append(loss.item())
            train(s, loss)

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 30)
    assert coexecuted(report, 12)


def test_a_number_of_elements_that_never_changed_may_change():
    def step(s, k, tape):
        x = torch.randn(24, 4)
        mask = torch.arange(24) < (9 if k != 7 else 14)
        with tape():
            chosen = s.model(x)[mask]
            s.log.append(len(chosen))
            train(s, chosen.square().mean())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 14)
    assert report.fallbacks == 1


def test_a_mask_that_does_not_fit_raises_as_in_eager():
    def step(s, k, tape):
        x, mask = torch.randn(24, 4), mask_of(k, 25 if k == 9 else 24)
        with tape():
            train(s, s.model(x)[mask].square().mean())

    compare(of_model(lambda: nn.Linear(4, 3)), step, 14)


def test_several_sizes_by_data_in_one_iteration():
    def step(s, k, tape):
        x = torch.randn(12 + k % 5, 4)
        with tape():
            h = s.model(x)
            at = h.argmax(1)
            parts = [h[(at == c) | (torch.arange(len(h)) < 2)] for c in range(3)]
            loss = sum(p.square().mean() for p in parts) + torch.cat(parts).mean()
            train(s, loss)
            s.log.append([len(p) for p in parts])

    compare(of_model(lambda: nn.Linear(4, 3)), step, 40)


@pytest.mark.parametrize("executor", ["inductor", "placed"])
def test_executors_that_need_sizes_leave_them_to_aten(executor, monkeypatch):
    monkeypatch.setattr(coexec.options, "background", False)

    def step(s, k, tape):
        x, mask = torch.randn(24, 4), mask_of(k)
        with tape():
            loss = masked_loss(s.model, x, mask)
            train(s, loss)
            s.log.append(loss.item())

    assert coexecuted(compare(of_model(lambda: nn.Linear(4, 3)), step, 14, executor=executor), 6)
