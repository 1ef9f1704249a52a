"""The tensorrt backend: NVIDIA TensorRT through torch_tensorrt.

torch_tensorrt 2.13 pairs with TensorRT 11.0, and 2.11 with 10.15. TensorRT's libraries come from NVIDIA.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from placement.backends.base import Backend, Run
from placement.backends.cuda import no_cuda
from placement.backends.exported import empty, exported
from placement.backends.fusion import FuseChains
from placement.backends.optional import missing_packages, version_of
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule
from placement.segments import Segment


class TensorRT(Backend):
    """TensorRT engines in single precision."""

    name: ClassVar[str] = "tensorrt"
    level: ClassVar[Any] = "graph"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def missing(self) -> str | None:
        """It needs a CUDA device and torch_tensorrt with TensorRT's libraries."""
        return no_cuda() or missing_packages("torch_tensorrt")

    def rules(self) -> tuple[PatternRule, ...]:
        """Chains with reductions: it generates kernels for them."""
        return (FuseChains(),)

    def lower(self, segment: Segment) -> Any:
        """The segment as an exported program."""
        return exported(segment)

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """One engine; what TensorRT would leave to PyTorch makes the segment unsupported."""
        import torch_tensorrt

        inputs = [empty(spec) for spec in segment.inputs]
        try:
            module = torch_tensorrt.dynamo.compile(
                lowered,
                inputs,
                enabled_precisions={torch.float32},
                disable_tf32=True,
                require_full_compilation=True,
                min_block_size=1,
            )
        except Exception as error:
            raise Unsupported(f"tensorrt: {type(error).__name__}: {str(error)[:300]}") from error

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = module(*tensors)
            return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)

        return run

    def version_key(self) -> str:
        """torch_tensorrt's version and TensorRT's."""
        return f"{version_of('torch_tensorrt')} {version_of('tensorrt')}"
