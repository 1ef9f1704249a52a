"""Sizes that no trace had: PyTorch's own code may do something else with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.coexec.harness import compare, train

USUAL = [13, 17, 14, 19, 15, 14, 18, 16, 12, 11]


def logged(s, h):
    s.log.append((tuple(h.shape), h.stride(), len(h)))
    return h.square().mean()


def written_view(s, x):
    h = x[10:].t().reshape(-1)
    h.mul_(3)
    s.x = x
    return s.model(x).square().sum()


def written_if_contiguous(s, x):
    h = x[: len(x) // 6].t().contiguous()
    h.add_(1)
    return s.model(x).square().sum() + x.sum()


def whole_buffer(s, x):
    n = len(x)
    w = s.buffer[:, :n].contiguous()
    w.add_(1)
    h = s.buffer[:, :n].reshape(-1)
    h.mul_(0.5)
    s.w, s.h = w, h
    return (s.model(x) * w.sum(0)[:, None]).sum() * 1e-3 + s.buffer.sum()


def view_of_a_buffer(s, x):
    h = s.buffer[:, : len(x)].flatten()
    s.h = h
    s.buffer.add_(1)
    return s.model(x).sum() * h.sum() * 1e-6


def masked_and_cut(s, x):
    mask = torch.rand(len(x)) < [0.5, 0.7, 0.6, 0.4, 0.5, 0.2, 0.9][s.k % 7]
    return logged(s, s.model(x)[mask][:8])


def kept(s, x):
    s.kept = s.model(x)[:20].detach()
    s.more = torch.zeros(len(s.kept))
    return s.model(x).sum()


def pieces(parts):
    return sum((i + 1) * p.square().mean() for i, p in enumerate(parts))


def empty_products(s, x):
    n = len(x)
    return logged(s, s.model(x)[: n - 10][None].expand(4, n - 10, 6) @ torch.ones(4, 6, 3)).nan_to_num()


MORE = [*USUAL, 20, 25, 30, 13, 20, 25, 30, 10, 9, 12, 10, 11]
PROGRAMS = {
    "another algorithm from 25 rows on": lambda s, x: torch.cdist(s.model(x), s.model(x) + 1).square().mean(),
    "a slice that is cut off": lambda s, x: logged(s, s.model(x)[:10]),
    "a slice of the last ones that is cut off": lambda s, x: logged(s, s.model(x)[-10:]),
    "a slice with a step": lambda s, x: logged(s, s.model(x)[:11:2]),
    "a slice that was the whole tensor": lambda s, x: logged(s, s.model(x)[:20]) + (x[:20] * 2).sum(),
    "a result that was the whole tensor": kept,
    "a diagonal": lambda s, x: logged(s, s.model(x).diagonal(offset=2)),
    "one piece": lambda s, x: pieces(s.model(x).split(20)),
    "more pieces": lambda s, x: pieces(s.model(x).split(5)),
    "chunks": lambda s, x: pieces(s.model(x).chunk(3)),
    "nothing left": lambda s, x: s.model(x)[10:].square().sum(),
    "a number below zero": lambda s, x: F.smooth_l1_loss(s.model(x)[10:], torch.ones(len(x) - 10, 6)),
    "strides of nothing": empty_products,
    "one row is a view": written_view,
    "one row is contiguous": written_if_contiguous,
    "one row is squeezed": lambda s, x: logged(s, s.model(x)[: len(x) - 10].squeeze(0)),
    "one row has no variance": lambda s, x: F.batch_norm(
        s.model(x)[: len(x) - 10], None, None, training=True
    ).sum(),
    "one element has no variance": lambda s, x: F.instance_norm(s.model(x)[: len(x) - 10].t()[None]).sum(),
    "the whole buffer": whole_buffer,
    "a view of the whole buffer": view_of_a_buffer,
    "a long stride": lambda s, x: logged(s, F.conv1d(s.model(x).t()[None], torch.ones(6, 6, 2), stride=7)),
    "pooling": lambda s, x: logged(s, F.max_pool1d(s.model(x).t()[None], 2, 5)),
    "pooling that rounds up": lambda s, x: logged(
        s, F.avg_pool1d(s.model(x).t()[None], 3, 4, 1, ceil_mode=True)
    ),
    "which side is longer": lambda s, x: torch.linalg.pinv(s.model(x)[: len(x) - 9]).square().mean(),
    "a dimension of three": lambda s, x: torch.cross(s.model(x)[10:, :3], x[10:, :3].clone()).square().sum(),
    "masks": masked_and_cut,
}


@pytest.mark.filterwarnings("ignore:Using torch.cross:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_eager_does_with_another_size_is_done(program):
    def make():
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return SimpleNamespace(model=model, optimizer=optimizer, log=[], buffer=torch.zeros(5, 20), k=0)

    def step(s, k, tape):
        s.k = k
        x = torch.randn(MORE[k], 4)
        with tape():
            loss = PROGRAMS[program](s, x)
            train(s, loss)
            s.log.append(loss.item())

    compare(make, step, len(MORE))


def test_a_slice_that_takes_all_there_is_is_no_slice():
    """There is no operation then that would have the number."""
    bounds = [20, 25, 20, 30, 22, 10, 25, 7, 20, 40]

    def make():
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return SimpleNamespace(model=model, optimizer=optimizer, log=[])

    def step(s, k, tape):
        x = torch.randn(20, 4)
        with tape():
            h = s.model(x)[: bounds[k]]
            s.log.append(len(h))
            train(s, h.square().mean())

    compare(make, step, len(bounds))
