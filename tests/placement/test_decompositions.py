"""The decomposition of a convolution's backward against ATen's own."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from placement.decompositions import convolution_backward

aten = torch.ops.aten


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    per_in, per_out = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    size = [draw(st.integers(3, 6)) for _ in range(dims)]
    stride = [draw(st.integers(1, 3)) for _ in range(dims)]
    padding = [draw(st.integers(0, 2)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    output_padding = [min(draw(st.integers(0, 2)), s - 1) if transposed else 0 for s in stride]
    x = torch.randn(2, groups * per_in, *size, dtype=torch.float64)
    shape = (groups * per_in, per_out) if transposed else (groups * per_out, per_in)
    weight = torch.randn(*shape, *kernel, dtype=torch.float64)
    return x, weight, stride, padding, dilation, transposed, output_padding, groups


@given(convolutions())
def test_gradients_equal_atens(case):
    x, weight, stride, padding, dilation, transposed, output_padding, groups = case
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    try:
        y = aten.convolution(x, weight, None, *settings)
    except RuntimeError:
        assume(False)
    grad = torch.randn_like(y)
    bias = [y.shape[1]]
    expected = aten.convolution_backward(grad, x, weight, bias, *settings, [True, True, True])
    found = convolution_backward(grad, x, weight, bias, *settings, [True, True, True])
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)
