"""Convolutions in channels_last: the same values, in memory as the metadata says."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.lowering  # which the decompositions need
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from coexec._private_inductor import stride_operator
from coexec.executors.channels_last import KeepsLayout, to_channels_last

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def same_stride(tensor, stride):
    """Whether elements lie as with these strides; that of a dimension with one element says nothing."""
    sizes = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in sizes)


class Checked(torch.fx.Interpreter):
    """Runs a graph; what it computes has the strides that the metadata says."""

    def run_node(self, n):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.numel():
            assert same_stride(result, n.meta["val"].stride()), (n, result.stride())
        return result


def functional(function, *inputs):
    """The graph of a function, as TorchInductor has it."""
    written = make_fx(function, tracing_mode="fake")(*inputs)
    with config.patch(fallback_random=True):
        decompositions = select_decomp_table()
    graph = make_fx(torch.func.functionalize(written), decompositions, tracing_mode="fake")(*inputs)
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    return graph


def gradients(model):
    """A step of training as a function of the parameters and the input."""
    names = list(dict(model.named_parameters()))

    def step(values, x):
        values = [v.detach().requires_grad_() for v in values]
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        grads = torch.autograd.grad(out.square().mean(), values, allow_unused=True)
        return [out.detach(), *(g for g in grads if g is not None)]

    return step, [p.detach() for p in model.parameters()]


class Skip(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


LAYERS = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(8, 8, 1, bias=False),
    "groups": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=4),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "dilated": lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    "strided": lambda: nn.Sequential(nn.Conv2d(8, 8, 2, stride=2), nn.Upsample(scale_factor=2)),
    "one place": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Upsample(size=6)),
    "transposed": lambda: nn.ConvTranspose2d(8, 8, 3, padding=1),
    "skip": lambda: Skip(nn.Conv2d(8, 8, 3, padding=1)),
    "norm": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "groupnorm": lambda: nn.GroupNorm(2, 8),
    "relu": lambda: nn.ReLU(),
    "norm and relu_": lambda: nn.Sequential(LAYERS["norm"](), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Dropout(0.5),
    "dropout2d": lambda: nn.Dropout2d(0.5),
    "pool": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    "shuffle": lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "flat": lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 8 * 36), nn.Unflatten(1, (8, 6, 6))),
}


@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=40, deadline=None)
def test_a_step_of_training_has_the_same_values_and_strides_and_draws_the_same_numbers(
    names, channels_last, dtype
):
    # In channels_last, the graph of its backward pass that PyTorch records crashes already.
    assume(not (channels_last and "groupnorm" in names))
    torch.manual_seed(0)
    model = nn.Sequential(*(LAYERS[name]() for name in names), nn.Conv2d(8, 4, 3)).to(dtype)
    step, parameters = gradients(model)
    x = torch.randn(2, 8, 6, 6, dtype=dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    graph = functional(step, parameters, x)
    torch.manual_seed(1)
    expected = graph(parameters, x)

    to_channels_last(graph.graph)
    graph.graph.lint()

    inputs = torch.utils._pytree.tree_leaves((parameters, x))
    torch.manual_seed(1)
    results = Checked(graph).run(*inputs)
    for mine, theirs in zip(results, expected, strict=True):
        assert same_stride(mine, theirs.stride())
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_between_convolutions_nothing_is_converted():
    step, parameters = gradients(
        nn.Sequential(
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
        )
    )
    graph = functional(step, parameters, torch.randn(2, 8, 16, 16))

    to_channels_last(graph.graph)

    converted = set(graph.graph.find_nodes(op="call_function", target=stride_operator()))
    given = {n for node in graph.graph.nodes if node.target in CONVOLUTIONS for n in node.all_input_nodes}
    assert len(converted & given) == 5  # an image, three weights, and the gradient of the last result
    assert len(converted - given) == 4  # the last result and three gradients, as the program has them


def test_a_graph_without_such_convolutions_is_left_alone():
    graph = functional(lambda x, w: torch.conv1d(x, w).relu(), torch.randn(2, 3, 8), torch.randn(4, 3, 3))
    before = str(graph.graph)

    to_channels_last(graph.graph)

    assert str(graph.graph) == before


def test_strides_that_overlap_and_decide_about_numbers_are_not_given_up():
    def draw(x, w):
        y = torch.conv2d(x, w, padding=1)
        return torch.poisson(torch.sigmoid(y))

    graph = functional(draw, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    [drawn] = graph.graph.find_nodes(op="call_function", target=aten.poisson.default)
    with FakeTensorMode():
        drawn.args[0].meta["val"] = torch.empty(1).expand(2, 4, 8, 8)

    with pytest.raises(KeepsLayout, match="not dense"):
        to_channels_last(graph.graph)


def test_numbers_are_drawn_in_the_order_of_the_program_s_memory():
    def draw(x, w):
        return torch.poisson(torch.conv2d(x, w).square())

    graph = functional(draw, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    [drawn] = graph.graph.find_nodes(op="call_function", target=aten.poisson.default)
    before = drawn.args[0].meta["val"].stride()

    to_channels_last(graph.graph)

    assert drawn.args[0].target is stride_operator()
    assert drawn.args[0].meta["val"].stride() == before


@pytest.mark.parametrize(
    ("shape", "moves"), [((2, 4 * 6 * 6), True), ((2, 4, 36), False), ((2, 2, 2, 6, 6), False)]
)
def test_what_another_shape_would_move_is_converted_before_and_a_view_is_none(shape, moves):
    graph = functional(
        lambda x, w: torch.conv2d(x, w).tanh().reshape(shape),
        torch.randn(2, 3, 8, 8),
        torch.randn(4, 3, 3, 3),
    )
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # as TorchInductor has it

    to_channels_last(graph.graph)

    [reshaped] = graph.graph.find_nodes(op="call_function", target=aten.reshape.default)
    source = reshaped.args[0]
    assert (source.target is stride_operator()) is moves
    if not moves:
        assert source.meta["val"].is_contiguous(memory_format=torch.channels_last)
