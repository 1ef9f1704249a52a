"""The openvino backend: OpenVINO's PyTorch front end and CPU plugin, on PyTorch's memory."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any, ClassVar

import torch

from placement.backends.base import Backend, Run
from placement.backends.exported import exported, no_counterpart
from placement.backends.fusion import FuseIntoHeavy
from placement.backends.optional import missing_packages, version_of
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule
from placement.segments import Segment

DTYPES = frozenset(
    {torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool}
)


class OpenVINO(Backend):
    """OpenVINO's CPU plugin: oneDNN with its own layouts and code generation."""

    name: ClassVar[str] = "openvino"
    level: ClassVar[Any] = "graph"
    isolate: ClassVar[bool] = False

    def missing(self) -> str | None:
        """It needs the runtime with its PyTorch front end."""
        return missing_packages("openvino")

    def rules(self) -> tuple[PatternRule, ...]:
        """Heavy operations with what follows them."""
        return (FuseIntoHeavy(),)

    def supports(self, segment: Segment) -> str | None:
        """By dtype; operators are found out by trying."""
        return no_counterpart(segment, DTYPES)

    def lower(self, segment: Segment) -> Any:
        """OpenVINO's model; core ATen where the front end doesn't know the operations as written."""
        import openvino

        errors = []
        for core in (False, True):
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    model = openvino.convert_model(exported(segment, core=core))
                model.reshape({i: list(s.shape) for i, s in enumerate(segment.inputs)})
                return model
            except Exception as error:
                errors.append(f"{type(error).__name__}: {_summary(error)}")
        raise Unsupported(f"openvino: {errors[-1]}")

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """A compiled model with as many threads as PyTorch has, in single precision."""
        try:
            compiled = _core().compile_model(
                lowered,
                "CPU",
                {
                    "INFERENCE_PRECISION_HINT": "f32",
                    "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                    "PERFORMANCE_HINT": "LATENCY",
                    "NUM_STREAMS": 1,
                },
            )
        except Exception as error:
            raise Unsupported(f"openvino: {_summary(error)}") from error
        return _bound(compiled, segment)

    def version_key(self) -> str:
        """The runtime's version, and PyTorch's, whose exporter feeds it."""
        return f"{version_of('openvino')} torch {torch.__version__}"


def _core() -> Any:
    import openvino

    global _CORE
    if _CORE is None:
        _CORE = openvino.Core()
    return _CORE


_CORE: Any = None


def _bound(compiled: Any, segment: Segment) -> Run:
    import openvino

    request = compiled.create_infer_request()
    specs = segment.outputs
    positions = range(len(specs))
    tensor_of = openvino.Tensor

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = []
        for index, tensor in enumerate(inputs):
            shared = tensor_of(tensor.detach().contiguous().numpy(), shared_memory=True)
            held.append(shared)
            request.set_input_tensor(index, shared)
        outputs = tuple(torch.empty(s.shape, dtype=s.dtype) for s in specs)
        for index in positions:
            shared = tensor_of(outputs[index].numpy(), shared_memory=True)
            held.append(shared)
            request.set_output_tensor(index, shared)
        request.infer()
        return outputs

    run.__dict__["request"] = request  # what the runtime holds of the last call, for inspection
    return run


def _summary(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if "No conversion rule" in line or "Unsupported" in line or "Check" in line
    ]
    return (telling or lines or [type(error).__name__])[0][:300]
