"""The results of an iteration, given to Python.

In:  a committed iteration whose GraphRunner has ended.
Out: every placeholder that the program still holds is a real tensor, and every `.grad` is set.
"""

from __future__ import annotations

import sys

import torch

from coexec._native import core
from coexec.runners.graph_runner import GraphRunner
from coexec.runners.iteration import Iteration
from coexec.runners.native import NativeRunner
from coexec.runners.placeholder import Symbol, dressed, realize
from coexec.runners.skeleton import Skeleton
from coexec.tracegraph import calls
from coexec.tracegraph.trace import Produced


def _references(symbol: Symbol) -> int:
    return sys.getrefcount(symbol.tensor)


#: What `_references` counts for a placeholder that only its symbol refers to.
_NO_REFERENCES = _references(Symbol(torch.empty(0), Produced(0, 0), calls.meta_of(torch.empty(0)), None))


def alive(iteration: Iteration) -> list[Produced]:
    """Placeholders that somebody besides this iteration refers to."""
    if core is not None:
        found: list[Produced] = core.held(iteration.symbols, Symbol)
        return found
    return [s.binding for s in iteration.symbols.values() if _references(s) > _NO_REFERENCES]


def publish(iteration: Iteration, skeleton: Skeleton, graph_runner: GraphRunner) -> None:
    """Makes the placeholders that the program holds real tensors, and sets gradients."""
    it = iteration
    real: dict[Produced, torch.Tensor] = {}
    for binding in it.alive:
        real[binding] = it.symbol_of(binding).tensor
        realize(real[binding], _real(iteration, skeleton, graph_runner, binding))
    plain: list[tuple[torch.Tensor, int]] = []
    for leaf, value in it.grads.values():
        target = it.symbol_of(leaf).tensor if isinstance(leaf, Produced) else leaf
        assert target is not None
        if isinstance(leaf, Produced) and it.symbol_of(leaf).binding not in real:
            continue  # nobody refers to the leaf any more
        if isinstance(value, Produced):
            binding = it.symbol_of(value).binding
            register = skeleton.plain.get((binding.event, binding.output))
            if register is not None and binding not in real and isinstance(graph_runner, NativeRunner):
                plain.append((target, register))
                continue
            if binding not in real:
                real[binding] = _real(iteration, skeleton, graph_runner, binding)
            value = real[binding]
        target.grad = value
    if plain and isinstance(graph_runner, NativeRunner):
        core.set_gradients(graph_runner.core, [t for t, _ in plain], [r for _, r in plain])


def _real(
    iteration: Iteration, skeleton: Skeleton, graph_runner: GraphRunner, binding: Produced
) -> torch.Tensor:
    program = skeleton.program
    output = skeleton.graph.nodes[binding.event].outputs[binding.output]
    value = graph_runner.value(program.plans[binding.event].outputs[binding.output])
    rebase = program.rebased.get((binding.event, binding.output))
    if rebase is not None and (rebase.shadow is None or _share(value, graph_runner.value(rebase.shadow))):
        base, meta = iteration.object_of(rebase.external), output.meta
        assert base is not None
        # An index may have been fed: the view of the shadow knows.
        shift = rebase.shift if program.compiled else value.storage_offset()
        offset = int(base.storage_offset()) + shift
        value = torch.as_strided(base.detach(), meta.shape, meta.stride, offset)
    return dressed(value, output.meta, output.history)


def _share(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors are on the same memory; the second one was not made on every path."""
    return b is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata
