"""The inductor backend: TorchInductor with weights folded in, one library a segment."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from placement._private import compile_frozen
from placement.backends.base import Backend, Run
from placement.backends.exported import empty
from placement.backends.fusion import FuseChains
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule
from placement.segments import Segment


class Inductor(Backend):
    """C++ loops (or Triton on CUDA) for what is elementwise or a reduction, oneDNN and MKL for the rest."""

    name: ClassVar[str] = "inductor"
    level: ClassVar[Any] = "graph"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    isolate: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}
    """Further settings of `torch._inductor.config`."""

    def rules(self) -> tuple[PatternRule, ...]:
        """It generates loops for whole chains."""
        return (FuseChains(),)

    def lower(self, segment: Segment) -> Any:
        """Nothing to do before compilation."""
        return segment.module

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """Compiles the graph below torch.compile's guards."""
        try:
            compiled = compile_frozen(lowered, [empty(s) for s in segment.inputs], self.options)
        except Exception as error:
            raise Unsupported(f"TorchInductor: {type(error).__name__}: {str(error)[:300]}") from error

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(compiled([*inputs]))

        return run
