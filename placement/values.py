"""Example values for every tensor of a graph, so that any segment of it can be tried alone.

In:  an OpGraph and real inputs.
Out: for each node what its tensor looked like; from that, inputs for any segment.

Whole activations would not fit into memory for large models. Of floating-point tensors the mean, the
deviation and the range are kept, and values drawn from them; integers and booleans are kept as they are,
since they are indices and masks, where other values mean other work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from placement.graph import OpGraph, TensorSpec, spec_of
from placement.segments import Segment


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the elements of a floating-point tensor were spread."""

    mean: float
    deviation: float
    low: float
    high: float


@dataclass(frozen=True)
class Examples:
    """What the tensors of a graph looked like in one run."""

    known: dict[Node, torch.Tensor | Distribution]

    def inputs(self, segment: Segment, seed: int = 0) -> list[torch.Tensor]:
        """Inputs for a segment, the same ones each time."""
        return [self._value(node, seed + i) for i, node in enumerate(segment.sources)]

    def _value(self, node: Node, seed: int) -> torch.Tensor:
        known = self.known[node]
        if isinstance(known, torch.Tensor):
            return spec_of(node).lay_out(known)
        return draw(spec_of(node), known, seed)


def draw(spec: TensorSpec, distribution: Distribution, seed: int) -> torch.Tensor:
    """A tensor of a spec with normally distributed values within a range."""
    generator = torch.Generator().manual_seed(seed)
    dtype = spec.dtype if spec.dtype.is_floating_point else torch.float32
    values = torch.randn(spec.shape, generator=generator, dtype=torch.float32)
    values.mul_(distribution.deviation).add_(distribution.mean).clamp_(distribution.low, distribution.high)
    return spec.lay_out(values.to(dtype))


def describe(value: torch.Tensor) -> torch.Tensor | Distribution:
    """What is kept of a tensor."""
    if not value.dtype.is_floating_point or value.numel() <= 4096:
        return value.detach().clone(memory_format=torch.preserve_format)
    flat = value.detach().float()
    deviation, mean = torch.std_mean(flat)
    low, high = torch.aminmax(flat)
    return Distribution(mean.item(), deviation.item(), low.item(), high.item())


class _Recorder(Interpreter):
    def __init__(self, graph: OpGraph, known: dict[Node, torch.Tensor | Distribution]) -> None:
        super().__init__(graph.module)
        self.known = known

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "call_function") and isinstance(result, torch.Tensor):
            self.known[n] = describe(result)
        return result


def record(graph: OpGraph, inputs: list[torch.Tensor]) -> Examples:
    """Runs a graph once and notes what its tensors looked like."""
    known: dict[Node, torch.Tensor | Distribution] = {}
    with torch.no_grad():
        _Recorder(graph, known).run(*inputs)
    return Examples(known)
