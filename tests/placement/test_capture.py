"""Capturing a model: what the graph computes, what it refuses, how arguments are nested."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import nn

from placement.capture import capture
from placement.errors import CaptureError
from placement.graph import bits
from placement.segments import cut, key_of
from placement.values import record
from tests.placement.graphs import Attention, Block, TwoOutputs, op_graphs, seeded


def run_whole(captured, *args, **kwargs):
    with torch.no_grad():
        return captured.unflatten(captured.graph.module(*captured.flatten(*args, **kwargs)))


@pytest.mark.parametrize(
    ("model", "examples"),
    [(Block(), (torch.randn(2, 16, 8, 8),)), (Attention(), (torch.randn(2, 5, 32),))],
)
def test_the_captured_graph_computes_what_the_model_computes_bit_for_bit(model, examples):
    model = seeded(model)
    with torch.no_grad():
        assert torch.equal(run_whole(capture(model, examples), *examples), model(*examples))


def test_nested_outputs_and_keywords_are_as_the_module_has_them():
    model = seeded(TwoOutputs())
    index, y = torch.tensor([1, 2]), torch.randn(2, 8)
    captured = capture(model, (index, y))
    expected = model(index, y)
    for result in (run_whole(captured, index, y), run_whole(captured, index, y=y)):
        assert torch.equal(result["sum"], expected["sum"])
        assert torch.equal(result["out"][1], expected["out"][1])
    with pytest.raises(CaptureError, match="nested as"):
        captured.flatten([index, y])


def test_batch_normalisation_is_one_operation_and_dropout_leaves_nothing():
    graph = capture(seeded(nn.Sequential(Block(), nn.Dropout(0.5))), (torch.randn(1, 16, 4, 4),)).graph
    assert [op.name for op in graph.ops] == [
        "conv2d",
        "batch_norm",
        "relu",
        "conv2d",
        "batch_norm",
        "add",
        "relu",
    ]


class OfConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return x @ (self.weight * 2).t().contiguous()


def test_what_depends_on_constants_alone_is_computed_once():
    graph = capture(OfConstants(), (torch.randn(2, 4),)).graph
    assert [op.name for op in graph.ops] == ["matmul"]


class Branches(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("model", "examples", "message"),
    [
        (Branches(), (torch.ones(2),), "cannot capture Branches as one graph.*torch.compile"),
        (Counts(), (torch.ones(2),), "the model writes to .*calls.*model.eval"),
        (nn.BatchNorm1d(3).train(), (torch.ones(2, 3),), "the model writes to .*eval"),
        (nn.ReLU(), (3,), "hold no tensor"),
        (torch.relu, (torch.ones(2),), "not builtin_function_or_method. Wrap"),
    ],
)
def test_a_model_that_cannot_be_one_graph_is_refused_with_what_to_do(model, examples, message):
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        capture(model, examples)


def test_dynamic_shapes_are_refused():
    batch = torch.export.Dim("batch")
    program = torch.export.export(nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: batch},))
    with pytest.raises(CaptureError, match=r"dynamic shape.*without dynamic_shapes"):
        capture(program, (torch.ones(4, 2),))


@given(op_graphs())
def test_a_graph_is_what_its_segments_are_one_after_the_other(graph):
    x = torch.rand(4) - 0.5
    values = {}
    for op in graph.ops:
        segment = cut(graph, 1 << op.index)
        outputs = segment.module(*(values.get(n, x) for n in segment.sources))
        values.update(zip(segment.results, outputs, strict=True))
    results = graph.module(x)
    expected = [values[n] for n in graph.module.graph.output_node().args[0]]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@given(op_graphs())
def test_only_convex_sets_can_be_cut(graph):
    for mask in range(1, 1 << len(graph), 7):
        if graph.is_convex(mask):
            assert len(cut(graph, mask).ops) == mask.bit_count()
        else:
            with pytest.raises(ValueError, match="comes back"):
                cut(graph, mask)


def test_segments_that_differ_in_weights_alone_have_one_key():
    graph = capture(
        seeded(nn.Sequential(Block(), Block(), Block(groups=2))), (torch.randn(1, 16, 8, 8),)
    ).graph
    first, second, third = (sum(1 << i for i in range(7 * k, 7 * k + 7)) for k in range(3))
    assert key_of(graph, first) == key_of(graph, second)
    assert key_of(graph, first) != key_of(graph, third)
    assert len({key_of(graph, 1 << i) for i in bits(first)}) == 5


def test_example_values_are_like_those_of_the_run():
    model = seeded(TwoOutputs())
    captured = capture(model, (torch.tensor([1, 2] * 600), torch.randn(1200, 8)))
    index = torch.tensor([1, 2] * 600)
    examples = record(captured.graph, [index, torch.randn(1200, 8) * 3 + 5])
    inputs = examples.inputs(cut(captured.graph, captured.graph.all))
    assert torch.equal(inputs[0], index)
    assert inputs[1].mean().item() == pytest.approx(5, abs=0.2)
    assert inputs[1].std().item() == pytest.approx(3, abs=0.2)
    assert torch.equal(inputs[1], examples.inputs(cut(captured.graph, captured.graph.all))[1])
