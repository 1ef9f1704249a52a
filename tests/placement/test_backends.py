"""Every backend against ATen: values, borders, memory. Missing ones skip with the reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from placement.backends import built_in
from placement.backends.base import Backend, relative_error
from placement.backends.optional import missing_packages
from placement.capture import capture, capture_graph
from placement.dynamo import captured_graphs
from placement.errors import Unsupported
from placement.executable import build
from placement.measuring.trial import attempt
from placement.placements import Part, Placement
from placement.segments import Segment, cut, whole
from placement.values import record
from tests.placement.graphs import Attention, Block, seeded

BACKENDS = built_in()
MODELS = {
    "block": (Block(), (torch.randn(1, 16, 10, 10),)),
    "attention": (Attention(), (torch.randn(2, 6, 32),)),
    "volume": (
        nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU()),
        (torch.randn(1, 3, 6, 7, 8),),
    ),
    "upsampling": (
        nn.Sequential(nn.ConvTranspose2d(6, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.Tanh()),
        (torch.randn(2, 6, 4, 4),),
    ),
}


def usable(backend: Backend) -> Backend:
    why = backend.missing()
    if why:
        pytest.skip(why)
    if "cpu" not in backend.devices:
        pytest.skip("it does not run on CPU")
    return backend


def captured(name: str):
    model, examples = MODELS[name]
    found = capture(seeded(model), examples)
    return found, record(found.graph, list(examples))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@torch.no_grad()
def test_a_whole_model_gives_atens_values_or_is_refused(backend, model):
    backend = usable(backend)
    found, examples = captured(model)
    segment = whole(found.graph)
    inputs = examples.inputs(segment)
    expected = segment.module(*inputs)
    trial = attempt(backend, segment, inputs, expected)
    if trial.run is None:
        assert trial.failure.status == "unsupported", trial.failure
        assert trial.failure.detail
        return
    for scale in (1.0, -2.0):
        changed = [scale * x for x in inputs]
        for got, wanted in zip(trial.run(*changed), segment.module(*changed), strict=True):
            assert relative_error(got, wanted) < 1e-4
            assert got.stride() == wanted.stride()
            assert got.dtype == wanted.dtype


SLOW = ("inductor", "onnxruntime", "openvino")
"""Backends that take about a second to compile an operation."""


@pytest.mark.parametrize(
    "backend",
    [pytest.param(b, id=b.name, marks=pytest.mark.slow if b.name in SLOW else ()) for b in BACKENDS],
)
@torch.no_grad()
def test_each_operation_alone_gives_atens_values_or_is_refused(backend):
    backend = usable(backend)
    if not backend.automatic:
        pytest.skip("compiling each operation takes it too long")
    tried = {}
    for model in ("block", "attention"):
        found, examples = captured(model)
        for op in found.graph.ops:
            segment = cut(found.graph, 1 << op.index)
            if segment.key in tried:
                continue
            inputs = examples.inputs(segment)
            trial = tried[segment.key] = attempt(backend, segment, inputs, segment.module(*inputs))
            known_limit = backend.name == "inductor" and segment.title == "scaled_dot_product_attention"
            if trial.run is None and not known_limit:  # TorchInductor assumes other strides than the kernel's
                assert trial.failure.status == "unsupported", (str(segment), trial.failure)
    assert any(trial.run is not None for trial in tried.values())


def backward_graph():
    """The backward graph of a block in training, and its inputs."""
    torch._dynamo.reset()
    graphs: list = []
    compiled = torch.compile(seeded(Block()).train(), backend=partial(captured_graphs, graphs), dynamic=False)
    compiled(torch.randn(2, 16, 6, 6, requires_grad=True)).square().mean().backward()
    torch._dynamo.reset()
    return graphs[1]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["inductor", "onnxruntime", "openvino"])
def test_the_backward_of_a_convolution_runs_on_every_compiler(name):
    backend = usable(next(b for b in BACKENDS if b.name == name))
    module, inputs = backward_graph()
    with torch.no_grad():
        graph = capture_graph(module).graph
        examples = record(graph, inputs)
        # The other convolution's bias stands before a batch norm: its gradient is nothing but rounding error.
        *_, op = (op for op in graph.ops if op.name == "convolution_backward")
        segment = cut(graph, 1 << op.index)
        values = examples.inputs(segment)
        expected = segment.module(*values)
        trial = attempt(backend, segment, values, expected)
        assert trial.run is not None, trial.failure
        for got, wanted in zip(trial.run(*values), expected, strict=True):
            assert relative_error(got, wanted) < 1e-4


@pytest.mark.parametrize("name", ["block", "attention"])
@torch.no_grad()
def test_tensors_cross_backends_without_copies(name):
    """Each part gets the very memory that the part before it returned."""
    found, examples = captured(name)
    backends = [b for b in BACKENDS if b.name in ("onnxruntime", "openvino", "inductor") and not b.missing()]
    seen: list[tuple[list[int], list[int]]] = []
    parts, groups = {}, [range(0, 3), range(3, len(found.graph))]
    placement = []
    for number, group in enumerate(groups):
        backend = backends[number % len(backends)]
        part = Part(sum(1 << i for i in group), backend.name)
        segment = cut(found.graph, part.mask)
        inputs = examples.inputs(segment)
        trial = attempt(backend, segment, inputs, segment.module(*inputs))
        assert trial.run is not None, trial.failure

        def spy(*tensors, run=trial.run):
            outputs = run(*tensors)
            seen.append(([t.data_ptr() for t in tensors], [t.data_ptr() for t in outputs]))
            return outputs

        parts[part] = (segment, spy)
        placement.append(part)
    run = build(found.graph, Placement.of(found.graph, placement), parts)
    x = MODELS[name][1][0]
    run(x)
    (first_in, first_out), (second_in, _) = seen
    assert first_in == [x.data_ptr()]
    assert set(second_in) <= {x.data_ptr(), *first_out}
    assert set(first_out) <= set(second_in)


@torch.no_grad()
def test_onnxruntime_reads_and_writes_pytorchs_memory():
    backend = usable(next(b for b in BACKENDS if b.name == "onnxruntime"))
    x, run = compiled(backend)
    (y,) = run(x)
    assert run.binding.get_outputs()[0].data_ptr() == y.data_ptr()


@torch.no_grad()
def test_openvino_reads_and_writes_pytorchs_memory():
    backend = usable(next(b for b in BACKENDS if b.name == "openvino"))
    x, run = compiled(backend)
    (y,) = run(x)
    assert run.request.get_input_tensor(0).data.ctypes.data == x.data_ptr()
    assert run.request.get_output_tensor(0).data.ctypes.data == y.data_ptr()


def compiled(backend: Backend):
    found, _ = captured("block")
    segment = whole(found.graph)
    return MODELS["block"][1][0], backend.compile(backend.lower(segment), segment)


class Half(Backend):
    """Wrong by design, in the way that `fault` says."""

    name = "half"

    def __init__(self, fault) -> None:
        self.fault = fault

    def lower(self, segment: Segment):
        if self.fault == "lower":
            raise Unsupported("no such thing")
        return segment.module

    def compile(self, lowered, segment: Segment):
        memory = {}

        def run(*inputs):
            if self.fault == "raises":
                raise ValueError("boom")
            outputs = lowered(*inputs)
            if self.fault == "values":
                return tuple(o + 0.001 * o.abs().max() for o in outputs)
            if self.fault == "count":
                return (*outputs, outputs[0])
            if self.fault == "shape":
                return tuple(o[None] for o in outputs)
            if self.fault == "dtype":
                return tuple(o.double() for o in outputs)
            if self.fault == "inputs":
                inputs[0].mul_(2)
            if self.fault == "memory":
                return tuple(
                    memory.setdefault(i, torch.empty_like(o)).copy_(o) for i, o in enumerate(outputs)
                )
            return outputs

        return run


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        ("lower", "unsupported", "no such thing"),
        ("raises", "crashed", "ValueError: boom"),
        ("values", "wrong", "off by"),
        ("count", "wrong", "2 tensors instead of 1"),
        ("shape", "wrong", "shape"),
        ("dtype", "wrong", "float64 instead of"),
        ("inputs", "wrong", "it writes to its inputs"),
        ("memory", "wrong", "its outputs change when it is called again"),
    ],
)
@torch.no_grad()
def test_what_a_backend_does_wrong_is_told_apart(fault, status, detail):
    found, examples = captured("block")
    segment = cut(found.graph, 1)
    inputs = examples.inputs(segment)
    failure = attempt(Half(fault), segment, inputs, segment.module(*inputs)).failure
    assert failure.status == status
    assert detail in failure.detail


def test_nan_and_infinity_must_agree():
    wanted = torch.tensor([1.0, float("nan"), float("inf")])
    assert relative_error(wanted.clone(), wanted) == 0
    assert relative_error(torch.tensor([1.0, 0.0, float("inf")]), wanted) == float("inf")
    assert relative_error(torch.tensor([float("nan"), float("nan"), float("inf")]), wanted) == float("inf")


def test_a_missing_package_is_said_with_what_to_do():
    assert "pip install 'coexec[no_such_package]'" in missing_packages("no_such_package")


def test_a_package_that_cannot_be_imported_is_said_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise OSError('libnvinfer.so.11: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "cannot be imported: OSError: libnvinfer.so.11" in missing_packages("broken_package")
