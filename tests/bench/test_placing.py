"""The contest of `bench placement`: each mode is what its name says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.placing import COMPILE_MODES, Contest, add_compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@torch.no_grad()
def test_only_the_frozen_mode_has_weights_as_constants():
    model, x, contest = nn.Linear(8, 8).eval(), torch.ones(2, 8), Contest()
    for mode in COMPILE_MODES:
        add_compiled(contest, model, (x,), mode)
    before = model(x)

    for parameter in model.parameters():
        parameter.zero_()

    assert not contest.errors
    assert {mode for mode, call in contest.calls.items() if call().any()} == {"compile:frozen"}
    torch.testing.assert_close(contest.calls["compile:frozen"](), before)
