"""Which kernel PyTorch chooses, and how it rounds, is as in eager execution."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from coexec.dynamic.runner import DynamicRunner
from tests.coexec.harness import coexecuted, compare, native, nothing

LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
PADDED = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)


def attention():
    layer = nn.TransformerEncoderLayer(**LAYER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nested tensors, where they are not used
        encoder = nn.TransformerEncoder(layer, 2)
    models = {"layer": layer, "encoder": encoder, "attention": nn.MultiheadAttention(8, 2, batch_first=True)}
    for model in models.values():
        model.eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
    return SimpleNamespace(log=[], x=torch.randn(2, 5, 8), **models)


ATTENDING = {
    "a layer": lambda s, x: s.layer(x),
    "an encoder": lambda s, x: s.encoder(x),
    "an encoder with padding": lambda s, x: s.encoder(x, src_key_padding_mask=PADDED),
    "attention": lambda s, x: s.attention(x, x, x, need_weights=False)[0],
    "attention with weights": lambda s, x: s.attention(x, x, x)[1],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("attend", ATTENDING.values(), ids=ATTENDING.keys())
def test_attention_in_evaluation_takes_the_kernel_that_it_takes_in_eager(attend, frozen):
    """PyTorch asks whether a mode looks on, and has another kernel then, with other results."""

    def step(s, k, tape):
        for model in (s.layer, s.encoder, s.attention):
            model.requires_grad_(not frozen)
        with tape(), torch.set_grad_enabled(frozen):
            s.log.append(attend(s, s.x + k).sum().item())

    compare(attention, step, 8)


def test_attention_that_a_mode_of_the_users_sees_takes_the_kernel_that_it_takes_in_eager():
    def step(s, k, tape):
        with tape(), torch.no_grad(), torch.overrides.BaseTorchFunctionMode():
            s.log.append(s.layer(s.x + k).sum().item())

    compare(attention, step, 6)


def test_attention_that_trains_has_a_graph():
    def step(s, k, tape):
        s.layer.train()
        with tape():
            loss = s.layer(torch.randn(2, 5, 8)).square().mean()
            s.layer.zero_grad()
            loss.backward()
            s.log.append(loss.item())

    assert coexecuted(compare(attention, step, 8), 4)


@pytest.fixture
def denormals():
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("from_step", [0, 5])
def test_denormals_are_flushed_from_where_the_program_asks_for_it(denormals, from_step):
    def step(s, k, tape):
        x = torch.full((4,), 1e-30)
        with tape():
            for flushes in (True, False):
                if k >= from_step:
                    torch.set_flush_denormal(flushes)
                s.log.append((x * 1e-10 * 1e20 * 1e20).sum().item())

    report = compare(nothing, step, 10)

    assert "CX0121" in [c.id for c in report.causes]


def test_denormals_that_are_flushed_outside_of_blocks_leave_the_graph(denormals):
    def step(s, k, tape):
        x = torch.full((4,), 1e-30)
        torch.set_flush_denormal(k % 2 == 0)
        with tape():
            s.log.append((x * 1e-10 * 1e20 * 1e20).sum().item())

    assert coexecuted(compare(nothing, step, 10), 4)


PRECISIONS = {
    "matmul of oneDNN": (torch.backends.mkldnn.matmul, "bf16"),
    "matmul of CUDA": (torch.backends.cuda.matmul, "tf32"),
    "convolutions of oneDNN": (torch.backends.mkldnn.conv, "bf16"),
}


@pytest.mark.parametrize(("backend", "precision"), PRECISIONS.values(), ids=PRECISIONS.keys())
def test_a_precision_of_one_backend_may_change_whenever_the_program_likes(backend, precision):
    before = backend.fp32_precision

    def make():
        model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
        return SimpleNamespace(model=model, log=[])

    def step(s, k, tape):
        with tape():
            backend.fp32_precision = precision if k % 3 == 1 else "ieee"
            loss = s.model(torch.randn(2, 2, 8, 8)).square().mean()
            s.model.zero_grad()
            loss.backward()
            s.log.append(loss.item())

    try:
        compare(make, step, 12)
    finally:
        backend.fp32_precision = before


@native
def test_the_call_by_call_phase_looks_at_these_settings_too(denormals, monkeypatch):
    entered = []
    enter = DynamicRunner.__enter__
    monkeypatch.setattr(DynamicRunner, "__enter__", lambda self: (entered.append(self), enter(self))[1])

    def step(s, k, tape):
        x = torch.full((4,), 1e-30)
        with tape():
            torch.randn(2, 2).to_sparse().sum().item()
            for flushes in (True, False):
                torch.set_flush_denormal(flushes)
                s.log.append((x * 1e-10 * 1e20 * 1e20).sum().item())

    compare(nothing, step, 10)

    assert entered
