"""The CUDA backends against ATen on the same device. They skip where there is none."""

from __future__ import annotations

import pytest
import torch

import placement
from placement.backends.base import relative_error
from placement.backends.cuda import Cublas, CudaGraphs, Cudnn, no_cuda
from placement.backends.inductor import Inductor
from placement.backends.tensorrt import TensorRT
from placement.backends.tvm import TVM
from placement.capture import capture
from placement.measuring.trial import attempt
from placement.segments import cut, whole
from placement.values import record
from tests.placement.graphs import Attention, Block, seeded

cuda = pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda()))


def captured(model, x):
    found = capture(seeded(model).cuda(), (x.cuda(),))
    return found, record(found.graph, [x.cuda()])


@cuda
@pytest.mark.parametrize("backend", [Inductor(), CudaGraphs(), TensorRT(), TVM()], ids=lambda b: b.name)
@torch.no_grad()
def test_a_block_on_a_graph_level_backend_equals_aten(backend):
    if backend.missing():
        pytest.skip(backend.missing())
    found, examples = captured(Block(), torch.randn(1, 16, 10, 10))
    segment = whole(found.graph)
    inputs = examples.inputs(segment)
    trial = attempt(backend, segment, inputs, segment.module(*inputs))
    assert trial.run is not None, trial.failure
    assert relative_error(trial.run(*inputs)[0], segment.module(*inputs)[0]) < 1e-4


@cuda
@pytest.mark.parametrize("backend", [Cudnn(), Cublas()], ids=lambda b: b.name)
@torch.no_grad()
def test_an_operation_on_a_library_equals_aten(backend):
    if backend.missing():
        pytest.skip(backend.missing())
    model, x = (
        (Block(), torch.randn(1, 16, 10, 10))
        if backend.name == "cudnn"
        else (Attention(), torch.randn(2, 6, 32))
    )
    found, examples = captured(model, x)
    wanted = "conv2d" if backend.name == "cudnn" else "linear"
    op = next(op for op in found.graph.ops if op.name == wanted)
    segment = cut(found.graph, 1 << op.index)
    inputs = examples.inputs(segment)
    trial = attempt(backend, segment, inputs, segment.module(*inputs))
    assert trial.run is not None, trial.failure


@cuda
def test_a_model_on_a_gpu_is_placed(quick):
    model, x = seeded(Block()).cuda(), torch.randn(1, 16, 10, 10, device="cuda")
    placed = placement.optimize(model, (x,), protocol=quick, level="op", log=None)
    torch.testing.assert_close(placed(x), model(x), rtol=1e-4, atol=1e-4)


def test_without_a_gpu_each_says_so():
    if no_cuda() is None:
        pytest.skip("there is a CUDA device")
    for backend in (Cudnn(), Cublas(), CudaGraphs(), TensorRT()):
        assert "CUDA" in backend.missing()
