"""The results of an iteration, given to Python.

In:  an iteration that is being committed; then, its GraphRunner that has ended.
Out: every placeholder that the program still holds is a real tensor, and every `.grad` is set.

What Python will get is found out while the GraphRunner commits: `results_of`. When that is done, `publish`
hands it over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from coexec._native import core
from coexec.runners.graph_runner import GraphRunner
from coexec.runners.iteration import Iteration
from coexec.runners.native import NativeRunner
from coexec.runners.placeholder import Symbol, dressed, realize
from coexec.runners.records import Token
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
            value = torch.as_strided(self.base.detach(), *self._geometry(value), offset)
        return dressed(value, meta, self.output.history)

    def _geometry(self, value: torch.Tensor) -> tuple[Any, Any]:
        meta = self.output.meta
        return (value.shape, value.stride()) if meta.is_symbolic else (meta.shape, meta.stride)


@dataclass(frozen=True, slots=True)
class Results:
    """What Python will get of an iteration.

    Attributes:
        values: outputs, in the order in which Python gets them.
        held: the placeholders of those that the program holds.
        gradients: tensors and what becomes their `.grad`: a tensor, one of `values`, or nothing.
        plain: in C++, tensors and the registers that become their `.grad` as they are, with the placeholders
            of these if Python may have got them; None without the native module.
    """

    values: dict[Produced, _Value]
    held: dict[Produced, torch.Tensor]
    gradients: list[tuple[torch.Tensor, torch.Tensor | Produced | None]]
    plain: Any

    @property
    def announced(self) -> list[torch.Tensor]:
        """The placeholders that Python has got, or may have got as a gradient."""
        return [*self.held.values(), *self.plain.placeholders()]


def results_of(iteration: Iteration, skeleton: Skeleton, *, native: bool, announced: bool) -> Results:
    """Finds out what Python will get of an iteration.

    Args:
        iteration: the iteration, which is valid.
        skeleton: its plan.
        native: whether C++ may hand gradients over.
        announced: whether `announce` will be called.
    """
    it = iteration
    plain: Any = None
    gradients: Iterable[tuple[Token, Token]] = it.grads.values()
    if native:
        held = {(binding.event, binding.output) for binding in it.alive}
        plain, gradients = skeleton.walker.plain_gradients(it.grads, it.placeholders, held, announced)
    results = Results({}, {}, [], plain)
    for binding in it.alive:
        results.held[binding] = it.symbol_of(binding).tensor
        results.values[binding] = _value(it, skeleton, binding)
    for leaf, value in gradients:
        target = it.symbol_of(leaf).tensor if isinstance(leaf, Produced) else leaf
        assert target is not None
        if isinstance(leaf, Produced) and it.symbol_of(leaf).binding not in results.held:
            continue  # nobody refers to the leaf any more
        if isinstance(value, Produced):
            symbol = it.symbol_of(value)
            value = symbol.binding
            if value not in results.values:
                results.values[value] = _value(it, skeleton, value)
            if announced:
                results.held[value] = symbol.tensor
        results.gradients.append((target, value))
    return results


def announce(results: Results) -> Callable[[], None]:
    """Sets gradients before they are computed: Python gets placeholders, which `publish` makes real.

    Returns:
        A function that puts back what was there.
    """
    placeholders = {id(t) for t in results.held.values()}
    targets: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []
    for target, gradient in results.gradients:
        if id(target) not in placeholders:
            targets.append(target)
            gradients.append(results.held[gradient] if isinstance(gradient, Produced) else gradient)
    before = core.announce_gradients(targets, gradients)
    results.plain.announce()

    def put_back() -> None:
        core.announce_gradients(targets, before)
        results.plain.take_back()

    return put_back


def _value(iteration: Iteration, skeleton: Skeleton, binding: Produced) -> _Value:
    program, place = skeleton.program, (binding.event, binding.output)
    rebase = program.rebased.get(place)
    return _Value(
        skeleton.graph.nodes[binding.event].outputs[binding.output],
        program.plans[binding.event].outputs[binding.output],
        rebase,
        None if rebase is None else iteration.object_of(rebase.external),
        any(b.executor == "inductor" for b in program.compiled),
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
    if results.plain is None:
        return
    assert isinstance(graph_runner, NativeRunner)
    made = set()
    for target, register, placeholder in results.plain.publish(graph_runner.core):
        if id(placeholder) not in made:
            realize(placeholder, core.alias_of(graph_runner.value(register)))
            made.add(id(placeholder))
        target.grad = placeholder


def _share(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors are on the same memory; the second one was not made on every path."""
    return b is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata
