"""Executors: what runs the blocks of a program.

`aten` runs a program's instructions as they are, one ATen operation after the other. `inductor`
replaces every block by a compiled library.
"""

from __future__ import annotations

import torch

from coexec.tracegraph.graph import Captured
from coexec.tracegraph.program import Program


def compile_program(program: Program, captured: dict[Captured, torch.Tensor], executor: str) -> Program:
    """The program for an executor; `captured` are examples of its captured tensors."""
    if executor == "aten":
        return program
    from coexec.executors.inductor import compile_blocks

    return compile_blocks(program, captured)
