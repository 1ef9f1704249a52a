"""The results of an iteration, given to Python.

In:  an iteration that is being committed; then, its GraphRunner that has ended.
Out: every placeholder that the program still holds is a real tensor, and every `.grad` is set.

What Python will get is found out while the GraphRunner commits: `results_of`. When that is done, `publish`
hands it over.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from coexec._native import core
from coexec.runners.graph_runner import GraphRunner
from coexec.runners.iteration import Iteration
from coexec.runners.native import NativeRunner
from coexec.runners.placeholder import Symbol, dressed, realize
from coexec.runners.skeleton import Skeleton
from coexec.tracegraph import calls
from coexec.tracegraph.program import Rebase
from coexec.tracegraph.trace import Output, Produced


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


@dataclass(frozen=True, slots=True)
class _Value:
    """An output that Python will get; `rebase` and `base` where it may view an external tensor."""

    output: Output
    register: int
    rebase: Rebase | None
    base: torch.Tensor | None
    compiled: bool

    def take(self, graph_runner: GraphRunner) -> torch.Tensor:
        value, rebase, meta = graph_runner.value(self.register), self.rebase, self.output.meta
        if rebase is not None and (rebase.shadow is None or _share(value, graph_runner.value(rebase.shadow))):
            assert self.base is not None
            # An index may have been fed: the view of the shadow knows.
            shift = rebase.shift if self.compiled else value.storage_offset()
            offset = int(self.base.storage_offset()) + shift
            value = torch.as_strided(self.base.detach(), meta.shape, meta.stride, offset)
        return dressed(value, meta, self.output.history)


@dataclass(frozen=True, slots=True)
class Results:
    """What Python will get of an iteration.

    Attributes:
        values: outputs, in the order in which Python gets them.
        held: the placeholders of those that the program holds.
        gradients: tensors and what becomes their `.grad`: a tensor, one of `values`, or nothing.
        plain: tensors and the registers that become their `.grad` as they are.
    """

    values: dict[Produced, _Value] = field(default_factory=dict)
    held: dict[Produced, torch.Tensor] = field(default_factory=dict)
    gradients: list[tuple[torch.Tensor, torch.Tensor | Produced | None]] = field(default_factory=list)
    plain: list[tuple[torch.Tensor, int]] = field(default_factory=list)


def results_of(iteration: Iteration, skeleton: Skeleton, *, native: bool) -> Results:
    """Finds out what Python will get of an iteration; `native` tells whether C++ may hand gradients over."""
    it, results = iteration, Results()
    for binding in it.alive:
        results.held[binding] = it.symbol_of(binding).tensor
        results.values[binding] = _value(it, skeleton, binding)
    for leaf, value in it.grads.values():
        target = it.symbol_of(leaf).tensor if isinstance(leaf, Produced) else leaf
        assert target is not None
        if isinstance(leaf, Produced) and it.symbol_of(leaf).binding not in results.held:
            continue  # nobody refers to the leaf any more
        if isinstance(value, Produced):
            value = it.symbol_of(value).binding
            register = skeleton.plain.get((value.event, value.output))
            if register is not None and value not in results.held and native:
                results.plain.append((target, register))
                continue
            if value not in results.values:
                results.values[value] = _value(it, skeleton, value)
        results.gradients.append((target, value))
    return results


def _value(iteration: Iteration, skeleton: Skeleton, binding: Produced) -> _Value:
    program, place = skeleton.program, (binding.event, binding.output)
    rebase = program.rebased.get(place)
    return _Value(
        skeleton.graph.nodes[binding.event].outputs[binding.output],
        program.plans[binding.event].outputs[binding.output],
        rebase,
        None if rebase is None else iteration.object_of(rebase.external),
        bool(program.compiled),
    )


def publish(results: Results, graph_runner: GraphRunner) -> None:
    """Makes the placeholders that the program holds real tensors, and sets gradients."""
    real = dict(results.held)
    for binding, value in results.values.items():
        tensor = value.take(graph_runner)
        if binding in real:
            realize(real[binding], tensor)
        else:
            real[binding] = tensor
    for target, gradient in results.gradients:
        target.grad = real[gradient] if isinstance(gradient, Produced) else gradient
    if results.plain:
        assert isinstance(graph_runner, NativeRunner)
        tensors, registers = zip(*results.plain, strict=True)
        core.set_gradients(graph_runner.core, list(tensors), list(registers))


def _share(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors are on the same memory; the second one was not made on every path."""
    return b is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata
