"""A segment compiled by a backend and verified: what was promised at its borders, and ATen's values.

In:  a Backend, a Segment, example inputs.
Out: a Trial: the function, or why there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from placement.backends.base import Backend, Run
from placement.errors import Unsupported
from placement.graph import TensorSpec
from placement.measuring.protocol import Measurement
from placement.segments import Segment


@dataclass(frozen=True)
class Trial:
    """A compiled and verified segment, or a Measurement that says why there is none."""

    run: Run | None
    failure: Measurement | None = None


def attempt(
    backend: Backend, segment: Segment, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> Trial:
    """Compiles a segment and compares what it gives with what ATen gave."""
    refusal = refused(backend, segment)
    if refusal is not None:
        return Trial(None, refusal)
    try:
        run = backend.compile(backend.lower(segment), segment)
    except Unsupported as error:
        return Trial(None, Measurement("unsupported", detail=str(error)))
    except Exception as error:
        return Trial(None, Measurement("crashed", detail=f"{type(error).__name__}: {error}"))
    if backend.reference:
        return Trial(run)
    try:
        kept = [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs]
        outputs = run(*inputs)
        wrong = backend.verify(outputs, expected) or _side_effects(run, outputs, inputs, kept)
        if wrong:
            return Trial(None, Measurement("wrong", detail=wrong))
        return Trial(conforming(run, outputs, segment.outputs))
    except Exception as error:
        return Trial(None, Measurement("crashed", detail=f"{type(error).__name__}: {error}"))


def refused(backend: Backend, segment: Segment) -> Measurement | None:
    """Why a backend does not even try; None if it does."""
    if segment.device not in backend.devices:
        return Measurement("unsupported", detail=f"it runs on {', '.join(backend.devices)}")
    try:
        why = backend.supports(segment)
    except Exception as error:
        return Measurement("crashed", detail=f"supports() raised {type(error).__name__}: {error}")
    return Measurement("unsupported", detail=why) if why else None


def _side_effects(
    run: Run, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
) -> str | None:
    """What a second call changes that it must not."""
    if any(not torch.equal(a, b) for a, b in zip(inputs, kept, strict=True) if not a.isnan().any()):
        return "it writes to its inputs"
    before = [tensor.clone() for tensor in outputs]
    run(*(_other(tensor) for tensor in inputs))
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(outputs, before, strict=True)):
        return "its outputs change when it is called again"
    return None


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Other values where any are allowed: indices and masks have to stay what they are."""
    return tensor * 0.5 if tensor.dtype.is_floating_point else tensor


def conforming(run: Run, outputs: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> Run:
    """The function with outputs in the strides that the graph has at its borders."""
    if all(tuple(o.stride()) == s.stride or o.numel() < 2 for o, s in zip(outputs, specs, strict=True)):
        return run

    def run_with_strides(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            o if o.stride() == s.stride else s.lay_out(o) for o, s in zip(run(*inputs), specs, strict=True)
        )

    return run_with_strides
