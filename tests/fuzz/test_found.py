"""What fuzzing has found, each as the smallest program that showed it, now equal to eager."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.coexec.harness import compare, linear


def skipping(optimizer):
    """A model whose layers are skipped at random."""

    def make():
        random.seed(0)
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        return SimpleNamespace(layers=layers, optimizer=optimizer(layers.parameters(), lr=0.05), log=[])

    return make


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("sizes", [[4], [4, 3, 5, 4, 2]], ids=["one size", "sizes"])
def test_layers_that_are_skipped_at_random_leave_eagers_parameters(optimizer, sizes):
    """Adagrad read a value that the path had not computed, and the iteration after that was not eager's."""

    def step(s, k, tape):
        x = torch.randn(sizes[k % len(sizes)], 3)
        with tape():
            h = x
            for layer in s.layers:
                if random.random() < 0.7:
                    h = h + layer(h).tanh()
            loss = (x + h).square().mean()
            if loss.requires_grad:
                s.optimizer.zero_grad()
                loss.backward()
                s.optimizer.step()

    compare(skipping(optimizer), step, 20)


def test_a_copy_that_is_written_in_place_is_no_part_of_the_backward_pass_beside_it():
    """Its version counter was raised for a tensor that the backward pass had saved."""

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            copy = x[:, :3].clone()
            copy.add_(h)
            other = x.clone()
            other.add_(other)
            other.add_(x)
            loss = (x[:, :3] + h).square().mean()
            loss.backward()
            s.optimizer.step()
            s.optimizer.zero_grad()

    compare(linear, step, 9)


def test_a_fallback_whose_trace_makes_a_program_run_call_by_call_is_taken_in(monkeypatch):
    """The list of the latest iterations was empty by then."""
    monkeypatch.setattr("coexec.program_state.ALWAYS_IN_PIECES", True)

    def make():
        state = SimpleNamespace(model=nn.Linear(3, 3))
        state.layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
        state.weight = nn.Parameter(torch.randn(3, 3))
        state.optimizer = torch.optim.SGD([*state.model.parameters(), state.weight], lr=0.05)
        state.data = [torch.randn(4, 3) for _ in range(12)]
        return state

    def step(s, k, tape):
        x = s.data[k]
        with tape():
            h = (x, s.model(x))[k % 2]
            some = (x[x[:, 0] > 0] @ s.weight).mean()
            loss = (h - x).square().mean() + some
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()

    compare(make, step, 12, synchronous=False, every=4)
