"""executor="placed" in coexec: training whose operations are placed equals eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coexec
from coexec.executors import placed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _settings(monkeypatch, quick):
    options = {"backends": ["aten-prepacked", "inductor"], "budget_s": 60, "level": "op", "protocol": quick}
    monkeypatch.setattr(placed, "settings", options)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.out(nn.functional.avg_pool2d(x, 2).flatten(1))


def train(tape, steps=6):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 3, 10, 10), torch.randint(0, 4, (4,))
        with tape():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_training_with_placed_stretches_equals_eager():
    from contextlib import nullcontext

    reference, expected = train(nullcontext)
    placed_before = next(placed._numbers)
    model, losses = train(lambda: coexec.GradientTape(executor="placed"))
    assert next(placed._numbers) > placed_before + 1, "nothing was placed"
    [report] = [p for p in coexec.explain().programs if p.blocks]
    assert {b.executor for b in report.blocks} == {"placed"}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for mine, wanted in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-5)
