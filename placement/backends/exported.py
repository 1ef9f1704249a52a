"""A segment as an ExportedProgram, the form that other libraries' front ends read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Container

import torch
from torch.export import ExportedProgram

from placement.decompositions import front_end_table
from placement.graph import TensorSpec
from placement.segments import Segment


def exported(segment: Segment, *, core: bool = False) -> ExportedProgram:
    """A segment as an exported program.

    Args:
        segment: what to export.
        core: whether to decompose to core ATen; a convolution's backward is decomposed in any case.
    """
    inputs = tuple(empty(spec) for spec in segment.inputs)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # FutureWarnings about torch's own use of pytree
        program = torch.export.export(copy.copy(segment.module), inputs)
        backward = any(n.target is torch.ops.aten.convolution_backward.default for n in program.graph.nodes)
        return program.run_decompositions(front_end_table()) if core or backward else program


def empty(spec: TensorSpec) -> torch.Tensor:
    """A tensor of a spec, its values undefined."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


def no_counterpart(segment: Segment, dtypes: Container[torch.dtype]) -> str | None:
    """Why another library cannot read a segment, by what comes in and leaves; None if it may."""
    for spec in (*segment.inputs, *segment.outputs):
        if spec.dtype not in dtypes:
            return f"{spec.dtype} has no counterpart"
    return None if segment.inputs else "it has no input"
