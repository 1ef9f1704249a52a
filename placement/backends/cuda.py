"""Backends for CUDA: the libraries that PyTorch calls, chosen one by one, and captured CUDA graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from placement.backends.aten import Aten
from placement.backends.base import Backend, Run
from placement.backends.exported import empty
from placement.backends.fusion import CONVOLUTIONS, MATMULS
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule, Site
from placement.segments import Segment


def no_cuda() -> str | None:
    """Why CUDA can't be used; None if it can."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    return None if torch.cuda.is_available() else "there is no CUDA device"


class Only(PatternRule):
    """Some operations, each alone."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def op_rule(self, node: Site) -> bool:
        """By name."""
        return node.name in self.names


class Cudnn(Backend):
    """cuDNN's convolutions, the fastest of its algorithms found by trying them."""

    name: ClassVar[str] = "cudnn"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    isolate: ClassVar[bool] = False

    def missing(self) -> str | None:
        """It needs a CUDA device and cuDNN."""
        return no_cuda() or (None if torch.backends.cudnn.is_available() else "cuDNN is not installed")

    def rules(self) -> tuple[PatternRule, ...]:
        """Convolutions."""
        return (Only(CONVOLUTIONS),)

    def lower(self, segment: Segment) -> Any:
        """The module itself."""
        return segment.module

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """Calls with cuDNN's benchmark switched on, and put back afterwards."""
        forward = lowered.forward

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                outputs: tuple[torch.Tensor, ...] = forward(*inputs)
            return outputs

        return run

    def version_key(self) -> str:
        """CuDNN's version."""
        return f"{torch.__version__} cuDNN {torch.backends.cudnn.version()}"


class Cublas(Backend):
    """Matrix products by cuBLASLt or cuBLAS, whichever PyTorch does not prefer by itself."""

    name: ClassVar[str] = "cublas"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    isolate: ClassVar[bool] = False

    def missing(self) -> str | None:
        """It needs a CUDA device."""
        return no_cuda()

    def rules(self) -> tuple[PatternRule, ...]:
        """Matrix products."""
        return (Only(MATMULS),)

    def lower(self, segment: Segment) -> Any:
        """The module itself."""
        return segment.module

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """Calls with the other library preferred, and the preference put back afterwards."""
        forward = lowered.forward
        preferred = torch.backends.cuda.preferred_blas_library

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before = preferred()
            preferred("cublas" if "lt" in str(before).lower() else "cublaslt")
            try:
                outputs: tuple[torch.Tensor, ...] = forward(*inputs)
            finally:
                preferred(before)
            return outputs

        return run

    def version_key(self) -> str:
        """CUDA's version."""
        return f"{torch.__version__} CUDA {torch.version.cuda}"


class CudaGraphs(Backend):
    """A captured CUDA graph: all kernels of a segment launched at once.

    It reads from and writes to memory of its own, so inputs and outputs are copied; that is in its cost.
    """

    name: ClassVar[str] = "cuda-graphs"
    level: ClassVar[Any] = "graph"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    isolate: ClassVar[bool] = False

    def missing(self) -> str | None:
        """It needs a CUDA device."""
        return no_cuda()

    def lower(self, segment: Segment) -> Any:
        """The module itself."""
        return segment.module

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """Captures a run."""
        inputs = [torch.zeros_like(empty(spec)) for spec in segment.inputs]
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        try:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    lowered(*inputs)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                outputs = lowered(*inputs)
        except RuntimeError as error:
            raise Unsupported(f"CUDA graphs: {str(error).splitlines()[0]}") from error

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for own, tensor in zip(inputs, given, strict=True):
                own.copy_(tensor)
            graph.replay()
            return tuple(o.clone(memory_format=torch.preserve_format) for o in outputs)

        return run

    def version_key(self) -> str:
        """CUDA's version."""
        return Aten().version_key() + f" CUDA {torch.version.cuda}"
