"""The onnxruntime backend: a segment as an ONNX model, run in place on PyTorch's memory by IOBinding."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any, ClassVar

import torch

from placement._private import export_onnx
from placement.backends.base import Backend, Run
from placement.backends.exported import exported, no_counterpart
from placement.backends.fusion import FuseIntoHeavy
from placement.backends.optional import missing_packages, version_of
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule
from placement.segments import Segment

ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
}
"""ONNX's numbers for dtypes (onnx.TensorProto.DataType)."""


class OnnxRuntime(Backend):
    """ONNX Runtime's CPU kernels, with its own blocked layout for convolutions."""

    name: ClassVar[str] = "onnxruntime"
    level: ClassVar[Any] = "graph"
    isolate: ClassVar[bool] = False

    def missing(self) -> str | None:
        """It needs the runtime, and the exporter's packages."""
        return missing_packages("onnxruntime", "onnx", "onnxscript")

    def rules(self) -> tuple[PatternRule, ...]:
        """Heavy operations with what follows them."""
        return (FuseIntoHeavy(),)

    def supports(self, segment: Segment) -> str | None:
        """By dtype; operators are found out by trying."""
        return no_counterpart(segment, ELEMENT_TYPES)

    def lower(self, segment: Segment) -> Any:
        """The ONNX model, as bytes."""
        noisy = logging.getLogger("torch.onnx")
        level = noisy.level
        noisy.setLevel(logging.ERROR)  # it reports that torchvision is not installed
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                return export_onnx(exported(segment))
        except Exception as error:
            raise Unsupported(f"torch.onnx: {type(error).__name__}: {_first_line(error)}") from error
        finally:
            noisy.setLevel(level)

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """An inference session, with as many threads as PyTorch has."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that spin between calls would take the cores from the next backend's segment.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = onnxruntime.InferenceSession(lowered, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise Unsupported(f"onnxruntime: {_first_line(error)}") from error
        return _bound(session, segment)

    def version_key(self) -> str:
        """The runtime's version and the exporter's."""
        return f"{version_of('onnxruntime')} onnxscript {version_of('onnxscript')} torch {torch.__version__}"


def _bound(session: Any, segment: Segment) -> Run:
    names_in = [i.name for i in session.get_inputs()]
    names_out = [o.name for o in session.get_outputs()]
    specs_out = segment.outputs
    kinds = [(ELEMENT_TYPES[s.dtype], list(s.shape)) for s in segment.inputs]
    kinds_out = [(ELEMENT_TYPES[s.dtype], list(s.shape)) for s in specs_out]
    used = _positions(names_in, len(segment.inputs))
    binding = session.io_binding()
    run_session = session.run_with_iobinding

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = []
        for name, position in zip(names_in, used, strict=True):
            tensor = inputs[position].contiguous()
            held.append(tensor)
            element, shape = kinds[position]
            binding.bind_input(name, "cpu", 0, element, shape, tensor.data_ptr())
        outputs = tuple(torch.empty(s.shape, dtype=s.dtype) for s in specs_out)
        for name, tensor, (element, shape) in zip(names_out, outputs, kinds_out, strict=True):
            binding.bind_output(name, "cpu", 0, element, shape, tensor.data_ptr())
        run_session(binding)
        return outputs

    run.__dict__["binding"] = binding  # what the runtime holds of the last call, for inspection
    return run


def _positions(names: list[str], count: int) -> list[int]:
    """Which input of the segment each input of the session is: the exporter keeps names and order."""
    positions = [int(name[1:]) for name in names]
    assert positions == sorted(positions), names
    assert all(p < count for p in positions), names
    return positions


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
