"""The onednn-graph backend: oneDNN Graph, which PyTorch reaches through TorchScript.

It fuses partitions into single oneDNN kernels and keeps blocked layouts between them.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

from placement.backends.base import Backend, Run
from placement.backends.exported import empty
from placement.backends.fusion import FuseIntoHeavy
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule
from placement.segments import Segment


class OneDNNGraph(Backend):
    """oneDNN's own graph compiler, for single precision on CPU."""

    name: ClassVar[str] = "onednn-graph"
    level: ClassVar[Any] = "graph"
    isolate: ClassVar[bool] = False

    def missing(self) -> str | None:
        """PyTorch must be built with oneDNN."""
        return None if torch.backends.mkldnn.is_available() else "this PyTorch is built without oneDNN"

    def rules(self) -> tuple[PatternRule, ...]:
        """Heavy operations with what follows them."""
        return (FuseIntoHeavy(),)

    def supports(self, segment: Segment) -> str | None:
        """Single precision; its fuser knows no other floating-point type."""
        if any(s.dtype.is_floating_point and s.dtype != torch.float32 for s in segment.inputs):
            return "it is not in single precision"
        return None if segment.inputs else "it has no input"

    def lower(self, segment: Segment) -> Any:
        """A frozen TorchScript graph."""
        inputs = tuple(torch.zeros_like(empty(s)) for s in segment.inputs)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                traced = torch.jit.trace(segment.module.eval(), inputs, check_trace=False)
                return torch.jit.freeze(traced.eval())
        except Exception as error:
            raise Unsupported(f"TorchScript: {type(error).__name__}: {str(error)[:300]}") from error

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """The executor specialises a graph in its first runs, which happen here."""
        inputs = tuple(torch.zeros_like(empty(s)) for s in segment.inputs)
        before = torch.jit.onednn_fusion_enabled()
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                torch.jit.enable_onednn_fusion(True)
                for _ in range(3):
                    lowered(*inputs)
        except Exception as error:
            raise Unsupported(f"oneDNN Graph: {str(error).splitlines()[-1][:300]}") from error
        finally:
            torch.jit.enable_onednn_fusion(before)
        run: Run = lowered.forward
        return run
