"""Blocks of the inductor executor without a compiler: their graphs, run operation by operation.

Everything but TorchInductor itself takes part, and no block costs seconds. A graph is run as strictly as
compiled code is made: no two inputs share memory, nor does an input share it with the world outside, and what
is written is written at the end.
"""

from __future__ import annotations

import torch

import coexec
from coexec._native import core
from coexec.executors import inductor
from coexec.executors.blocks import Block


def use_graphs(put=setattr):
    """Has the executor `inductor` run graphs, at once; `put` may be one that undoes it, as pytest's."""
    put(inductor, "library_of", library_of)
    put(coexec.options, "background", False)


def library_of(block: Block):
    """What takes the place of `coexec.executors.inductor.library_of`."""
    return core.Library(function_of(block))


def function_of(block: Block):
    """The block's graph as a function on a list of tensors."""

    def run(inputs):
        own = [_copy(t) for t in inputs]
        results = block.module(*own)
        first = len(inputs) - len(block.sources)
        for source, given, mine in zip(block.sources, inputs[first:], own[first:], strict=True):
            if source in block.written:
                given.copy_(mine)
        return list(results)

    return run


def _copy(tensor):
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
