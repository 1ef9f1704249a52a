"""Tensors that are no plain ones, and tensors that become others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.coexec.harness import coexecuted, compare, nothing

# Tensors of a block that get other memory, or look otherwise at theirs.


def assign(t, x):
    t.data = t + x


def assign_twice(t, x):
    t.data = x.clone()
    t.data = x * 2


def assign_between_uses(t, x):
    t.data = x.clone()
    t += 1
    t.data = t.data * x


def swap(t, x):
    other = x * 3
    t.data, other.data = other.data, t.data


CHANGES = {
    "assigned": assign,
    "assigned twice": assign_twice,
    "assigned between uses": assign_between_uses,
    "swapped": swap,
    "a view": lambda t, x: setattr(t, "data", (x * 2)[1:]),
    "transposed": lambda t, x: t.t_(),
    "one dimension more": lambda t, x: t.unsqueeze_(0),
    "one dimension less": lambda t, x: t.unsqueeze_(0).squeeze_(),
    "two dimensions exchanged": lambda t, x: t.swapaxes_(0, 1),
    "at other strides": lambda t, x: t.as_strided_((2, 2), (1, 3)),
    "detached": lambda t, x: t.detach_(),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_computed_tensor_that_is_changed_as_a_whole_is_what_it_became(change, kept):
    def step(s, k, tape):
        x = torch.randn(3, 3)
        with tape():
            t = torch.zeros(3, 3)
            change(t, x)
            s.log.append((tuple(t.shape), (t * 2).sum().item()))
            if kept:
                s.kept = t

    compare(nothing, step, 8)


def test_a_perturbation_that_is_assigned_step_by_step_has_a_graph():
    def make():
        return SimpleNamespace(model=nn.Linear(4, 3), log=[])

    def step(s, k, tape):
        x, y = torch.randn(5, 4), torch.randint(3, (5,))
        with tape():
            delta = torch.zeros_like(x).requires_grad_()
            for _ in range(3):
                loss = nn.functional.cross_entropy(s.model(x + delta), y)
                [grad] = torch.autograd.grad(loss, delta)
                delta.data = torch.clamp(delta + 0.1 * torch.sign(grad), -0.2, 0.2)
                delta.data = torch.max(torch.min(1 - x, delta.data), 0 - x)
            s.log.append((x + delta.detach()).sum().item())

    assert coexecuted(compare(make, step, 8), 4)


# Tensors that the call-by-call phase has to leave to Python.


def nested(x):
    parts = torch.nested.nested_tensor([x, x[:2]])
    return torch.nested.to_padded_tensor(parts, 0.0).sum().item()


OTHERS = {
    "nested": nested,
    "nested, and its size": lambda x: torch.nested.nested_tensor([x, x[:2]]).size(0),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged).values().sum().item(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8).int_repr().sum().item(),
    "on no device": lambda x: tuple(torch.empty(3, 4, device="meta").reshape(4, -1).shape),
    "sparse": lambda x: x.to_sparse().coalesce().values().sum().item(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:quantize_per_tensor")
@pytest.mark.parametrize("call_by_call", [False, True])
@pytest.mark.parametrize("use", OTHERS.values(), ids=OTHERS.keys())
def test_a_tensor_that_is_no_plain_one_is_what_it_is_in_eager(use, call_by_call):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            if call_by_call:
                torch.randn(2, 2).to_sparse().sum().item()
            s.log.append(use(x * 2))
            s.log.append(use(x))

    compare(nothing, step, 10)


def test_a_lazy_layer_that_is_first_called_late_is_initialized_then():
    def make():  # the harness does not look at what begins with an underscore: nothing can be read of it yet
        return SimpleNamespace(first=nn.Linear(4, 4), _second=nn.LazyLinear(3), log=[])

    def step(s, k, tape):
        with tape():
            hidden = s.first(torch.randn(5, 4))
            if k >= 5:
                hidden = s._second(hidden)
            loss = hidden.square().sum()
            loss.backward()
            s.log.append(loss.item())
        if k >= 5:
            s.log.append(s._second.weight.grad.clone())

    compare(make, step, 12)
