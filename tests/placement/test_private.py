"""The private parts of PyTorch that placement uses: they are there and do what is expected of them."""

from __future__ import annotations

import pytest
import torch

from placement import _private


@torch.no_grad()
def test_compile_frozen_takes_a_list_and_gives_the_functions_values():
    weight = torch.randn(4, 4)

    def function(x):
        return (torch.relu(x @ weight),)

    x = torch.randn(3, 4)
    compiled = _private.compile_frozen(function, [x], {})
    torch.testing.assert_close(compiled([x])[0], function(x)[0])


@torch.no_grad()
def test_packed_operations_compute_what_their_plain_ones_do():
    x, weight, bias = torch.randn(2, 6, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(4)
    packed = _private.pack_convolution(weight, [1, 1], [2, 2], [1, 1], 2, [2, 6, 9, 9])
    settings = (packed, bias, [1, 1], [2, 2], [1, 1], 2)
    expected = torch.nn.functional.conv2d(x, weight, bias, 2, 1, 1, 2)
    torch.testing.assert_close(_private.convolution()(x, *settings, "relu", [], None), expected.relu())
    other = torch.randn_like(expected)
    added = _private.convolution_add()(x, other, *settings, "add", 1.0, "relu", [], None)
    torch.testing.assert_close(added, (expected + other).relu())
    y, matrix = torch.randn(5, 6), torch.randn(3, 6)
    found = _private.linear()(y, _private.pack_linear(matrix, 5), None, "none", [], None)
    torch.testing.assert_close(found, y @ matrix.t())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_export_onnx_gives_a_model_that_the_checker_accepts():
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.randn(1, 3),))
    onnx.checker.check_model(onnx.load_from_string(_private.export_onnx(program)))
