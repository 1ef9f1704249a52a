"""The blocks of training programs: forward and backward graph of one step of a program of the suite.

They are what AOTAutograd makes of the model; weights are inputs, since training changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from bench.programs import PROGRAMS
from bench.workloads.base import Made, Size
from placement.dynamo import captured_graphs


def make(program: str, which: int, size: Size, batch: int, seed: int) -> Made:
    """A graph of a program's model and the inputs that it got in one step; `batch` is the program's own.

    Args:
        program: a name of the suite.
        which: 0 for the forward graph, 1 for the backward one.
        size: `full` is the program's preset `small`, which is for CPUs.
        batch: not used; a program has its own.
        seed: of the program.
    """
    training = PROGRAMS[program].make(seed, "tiny" if size == "tiny" else "small")
    graphs: list[tuple[GraphModule, list[torch.Tensor]]] = []
    backend: Callable[[GraphModule, Sequence[Any]], Any] = partial(captured_graphs, graphs)
    model: Any = training.model
    for part in model.modules():
        # Modes that draw different numbers can't be compared.
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            setattr(part, "dropout", 0.0)  # noqa: B010 - of a module that hands it on
    model.forward = torch.compile(model.forward, backend=backend, dynamic=False)
    with torch.enable_grad():
        training.step(nullcontext)
    module, inputs = graphs[which]
    return module, tuple(inputs)


def workload(program: str, which: int) -> Callable[[Size, int, int], Made]:
    """`make` for one graph of one program."""
    return partial(make, program, which)
