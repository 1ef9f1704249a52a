from __future__ import annotations

import pytest

from pipeline.errors import GraphError
from pipeline.transformer import (
    GPT3_96B,
    GPT3_134B,
    Transformer,
    batch_flops,
    layer_forward_flops,
    layer_saved_bytes,
    parameters,
    stage_saved_bytes,
    transfer_bandwidth,
    transformer_profile,
)

# Layers, hidden size, heads and billions of parameters. Source: PTD-P, Table 4.1.
TABLE_4_1 = [
    (24, 2304, 24, 1.7),
    (30, 3072, 32, 3.6),
    (36, 4096, 32, 7.5),
    (40, 6144, 48, 18.4),
    (48, 8192, 64, 39.1),
    (60, 10240, 80, 76.1),
    (80, 12288, 96, 145.6),
    (96, 16384, 128, 310.1),
    (105, 20480, 128, 529.6),
    (128, 25600, 160, 1008.0),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "billions"), TABLE_4_1)
def test_parameter_counts_are_those_of_the_published_table(layers, hidden, heads, billions):
    model = Transformer("gpt", layers, hidden, heads)
    assert round(parameters(model) / 1e9, 1) == billions


@pytest.mark.parametrize("samples", [1, 512])
def test_operations_equal_the_closed_form(samples):
    model = GPT3_96B
    s, L, h, V = model.sequence, model.layers, model.hidden, model.vocabulary
    closed = 96 * samples * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert batch_flops(model, samples, recompute=True) == pytest.approx(closed, rel=1e-12)
    without_recomputation = batch_flops(model, samples, recompute=False)
    saved = batch_flops(model, samples, recompute=True) - without_recomputation
    assert saved == pytest.approx(L * layer_forward_flops(model, samples))


def test_the_models_have_the_sizes_that_name_them():
    assert round(parameters(GPT3_96B) / 1e9) == 96
    assert round(parameters(GPT3_134B) / 1e9) == 134


def test_transfers_have_the_published_sizes_and_bandwidths():
    # GPT-3 96B, t=4, p=8, micro-batch of 2, forward 143.37 ms: 3.48 GB, 24.25 GB/s, 100.31 GB/s when nothing
    # is recomputed. Source: BPipe, appendix B.
    attention = stage_saved_bytes(GPT3_96B, 2, 8, tensor_parallel=4, recompute="attention")
    nothing = stage_saved_bytes(GPT3_96B, 2, 8, tensor_parallel=4)
    assert attention / 1e9 == pytest.approx(3.48, abs=0.005)
    assert transfer_bandwidth(attention, 0.14337) / 1e9 == pytest.approx(24.25, abs=0.005)
    assert transfer_bandwidth(nothing, 0.14337) / 1e9 == pytest.approx(100.31, abs=0.01)
    assert transfer_bandwidth(nothing, 0.14337, relaxed=True) == pytest.approx(
        2 / 3 * transfer_bandwidth(nothing, 0.14337)
    )


def test_layer_recomputation_keeps_an_input_that_tensor_parallelism_does_not_divide():
    whole = layer_saved_bytes(GPT3_96B, 1, recompute="layer")
    assert layer_saved_bytes(GPT3_96B, 1, tensor_parallel=8, recompute="layer") == whole
    assert whole == 2 * GPT3_96B.sequence * GPT3_96B.hidden


def test_the_profile_adds_up_to_the_closed_forms():
    graph = transformer_profile(GPT3_96B, flops_per_s=140e12, samples=2)
    total = graph.total()
    seconds = (total.forward_ms + total.backward_ms) / 1e3
    assert seconds == pytest.approx(batch_flops(GPT3_96B, 2, recompute=False) / 140e12)
    assert total.backward_ms == pytest.approx(2 * total.forward_ms)
    head = (
        GPT3_96B.vocabulary * GPT3_96B.hidden
    )  # on a stage of its own, the head has its own copy of the embedding
    assert total.parameter_bytes == pytest.approx(2 * (parameters(GPT3_96B) + head))
    assert graph.samples == 2


def test_an_impossible_shape_or_speed_is_refused():
    with pytest.raises(GraphError, match="layers is 0"):
        Transformer("m", 0, 1, 1)
    with pytest.raises(GraphError, match="must be positive"):
        transformer_profile(GPT3_96B, flops_per_s=0)
