"""Co-execution on a GPU; skipped where there is none."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coexec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def train(tape, steps, seed=0):
    """A small classifier with batch norm, dropout, Adam and clipping; returns everything observable."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 32, generator=data).cuda()
        y = torch.randint(0, 10, (64,), generator=data).cuda()
        with tape():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if step % 5 == 0:
                losses.append(loss.item())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses.append(loss.detach().clone())
    state = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    state += [v for s in optimizer.state.values() for v in s.values()]
    return losses, state, torch.cuda.get_rng_state()


def differences(ours, theirs):
    return [
        i
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
    ]


def test_aten_equals_eager_bit_for_bit_on_the_gpu():
    losses, state, random = train(contextlib.nullcontext, 30)
    again, state_again, _ = train(contextlib.nullcontext, 30)
    assert not differences(losses, again), "eager itself is not deterministic here"
    assert not differences(state, state_again), "eager itself is not deterministic here"
    coexec.reset()
    our_losses, our_state, our_random = train(coexec.GradientTape, 30)
    assert not differences(losses, our_losses)
    assert not differences(state, our_state)
    assert torch.equal(random, our_random)
    assert coexec.explain().programs[0].steps["co-execution"] >= 20


def test_a_side_stream_is_the_stream_of_the_graph():
    coexec.reset()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        losses, state, _ = train(coexec.GradientTape, 20)
    stream.synchronize()
    expected_losses, expected_state, _ = train(contextlib.nullcontext, 20)
    assert not differences(expected_losses, losses)
    assert not differences(expected_state, state)


@pytest.mark.slow
def test_inductor_equals_eager_within_rounding_on_the_gpu():
    losses, _, _ = train(contextlib.nullcontext, 20)
    coexec.reset()
    ours, _, _ = train(functools.partial(coexec.GradientTape, executor="inductor"), 20)
    assert coexec.explain().programs[0].blocks[0].executor == "inductor"
    for a, b in zip(losses, ours, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(a), torch.as_tensor(b), rtol=1e-3, atol=1e-4, check_device=False
        )
