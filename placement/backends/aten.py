"""The aten backend: PyTorch's own kernels, the reference that every other backend is verified against."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from placement.backends.base import Backend, Run
from placement.patterns.rules import PatternRule, Site
from placement.segments import Segment


class Anything(PatternRule):
    """Every operation, each alone."""

    def op_rule(self, node: Site) -> bool:
        """Whatever ATen has."""
        return True


class Aten(Backend):
    """One operation after the other, as eager PyTorch runs them."""

    name: ClassVar[str] = "aten"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    isolate: ClassVar[bool] = False
    reference: ClassVar[bool] = True

    def rules(self) -> tuple[PatternRule, ...]:
        """Every operation alone."""
        return (Anything(),)

    def lower(self, segment: Segment) -> Any:
        """The module itself."""
        return segment.module

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """Its generated Python code."""
        run: Run = lowered.forward
        return run

    def version_key(self) -> str:
        """The libraries that PyTorch was built with don't change without its version."""
        return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"

    def overhead(self) -> float:
        """None: its operations are calls in the same generated function."""
        return 0.0
