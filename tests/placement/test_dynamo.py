"""torch.compile(backend="placement"): inference and training, whose graphs are placed each."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from torch import nn

from placement.dynamo import placement_backend
from tests.placement.graphs import Attention, Block, seeded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def options(quick, **more):
    return {
        "backends": ["aten-prepacked", "inductor"],
        "budget_s": 60,
        "level": "op",
        "protocol": quick,
        **more,
    }


def test_the_name_placement_is_registered():
    entries = metadata.entry_points(group="torch_dynamo_backends")
    if "placement" not in entries.names:
        pytest.skip("the project was installed before it had this entry point")
    assert entries["placement"].load() is placement_backend


def test_a_compiled_model_equals_eager(quick):
    model, x = seeded(Attention()), torch.randn(1, 4, 32)
    compiled = torch.compile(model, backend=placement_backend, options=options(quick))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_forward_and_backward_of_training_equal_eager(quick):
    models = [seeded(Block()).train() for _ in range(2)]
    compiled = torch.compile(models[1], backend=placement_backend, options=options(quick))
    x = torch.randn(2, 16, 6, 6)
    for _ in range(2):
        for model, call in zip(models, (models[0], compiled), strict=True):
            model.zero_grad()
            (call(x) ** 2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
    for left, right in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_unknown_options_are_refused(quick):
    compiled = torch.compile(nn.ReLU(), backend=placement_backend, options={"budget": 3})
    with pytest.raises(Exception, match=r"no option budget. It has .*budget_s"):
        compiled(torch.ones(2))


def test_dynamic_shapes_are_refused(quick):
    compiled = torch.compile(nn.ReLU(), backend=placement_backend, dynamic=True, options=options(quick))
    with pytest.raises(Exception, match="dynamic"):
        compiled(torch.ones(3, 2))
