"""What each part of a module costs on this machine: run part by part, and measure.

In:  a module and example inputs, one micro-batch.
Out: a `ProfiledGraph`: milliseconds forward and backward, bytes of output, parameters and what is saved.

Each part runs by itself on what the parts before it gave: forward under the hooks that the runtime uses, then
backward for all its inputs and parameters. Times are the median of some repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import fx, nn

from pipeline.capture import Traced, trace
from pipeline.graph import Cost, ProfiledGraph
from pipeline.runtime.saved import Saved
from pipeline.runtime.storages import addresses

Value = Any
"""What an operator gives: a tensor, several of them, or a number."""


def profile(
    module: nn.Module,
    example_inputs: Sequence[torch.Tensor],
    *,
    depth: int | None = 1,
    repeat: int = 5,
    name: str | None = None,
) -> ProfiledGraph:
    """Measure a module.

    A storage that several parts save counts for the first of them, so that sums over parts are what a stage
    made of them holds. So does a parameter that several parts use.

    Args:
        module: The module.
        example_inputs: One micro-batch.
        depth: As for `capture`.
        repeat: How often each part is run.
        name: Of the model; the module's class when left out.

    Raises:
        GraphError: The module can't be captured.
    """
    traced = trace(module, example_inputs, depth=depth, name=name)
    samples = next((t.shape[0] for t in example_inputs if t.dim() > 0), 1)
    with torch.random.fork_rng(devices=_cuda(example_inputs)):
        costs = _Profiler(traced, module, example_inputs, repeat).run()
    return ProfiledGraph(traced.graph, costs, samples)


class _Profiler:
    """Values of the operators that have run, and what has been counted."""

    def __init__(
        self, traced: Traced, module: nn.Module, example_inputs: Sequence[torch.Tensor], repeat: int
    ) -> None:
        self.traced, self.repeat = traced, repeat
        signature = traced.program.graph_signature
        self.parameters: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        buffers = {name: b.clone() for name, b in module.named_buffers(remove_duplicate=False)}
        inputs = iter(example_inputs)
        self.values: dict[fx.Node, Value] = {}
        self.parameter_of: dict[fx.Node, torch.Tensor] = {}
        for node in traced.program.graph.find_nodes(op="placeholder"):
            if node.name in signature.inputs_to_parameters:
                self.parameter_of[node] = self.parameters[signature.inputs_to_parameters[node.name]]
                self.values[node] = self.parameter_of[node]
            elif node.name in signature.inputs_to_buffers:
                self.values[node] = buffers[signature.inputs_to_buffers[node.name]]
            elif node.name in signature.inputs_to_lifted_tensor_constants:
                constant = signature.inputs_to_lifted_tensor_constants[node.name]
                self.values[node] = traced.program.constants[constant]
            else:
                self.values[node] = next(inputs)
        self.keep = addresses([*self.parameters.values(), *buffers.values(), *example_inputs])
        self.counted: set[int] = set()
        self.alive: list[Saved] = []  # so that no address is used again

    def run(self) -> tuple[Cost, ...]:
        return tuple(self._part(part) for part in self.traced.parts)

    def _part(self, part: Sequence[fx.Node]) -> Cost:
        inside = set(part)
        sources = list(dict.fromkeys(s for node in part for s in node.all_input_nodes if s not in inside))
        used = [node for node in part if any(user not in inside for user in node.users)]
        given = {s: self._enter(s) for s in sources}
        learning = [v for v in given.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        saved = Saved(self.keep)
        with torch.enable_grad(), saved.hooks():
            made = _execute(part, given)
        saved.finish()
        forward_ms, backward_ms = [], []
        for _ in range(self.repeat):
            start = time.perf_counter()
            with torch.enable_grad():
                again = _execute(part, given)
            _synchronize(learning)
            forward_ms.append(1e3 * (time.perf_counter() - start))
            roots = [t for node in used for t in _tensors(again[node]) if t.requires_grad]
            if roots and learning:
                ones = [torch.ones_like(t) for t in roots]
                start = time.perf_counter()
                torch.autograd.grad(roots, learning, ones, allow_unused=True)
                _synchronize(learning)
                backward_ms.append(1e3 * (time.perf_counter() - start))
        for node in used:
            self.values[node] = made[node]
        outputs = {t.untyped_storage().data_ptr(): t for node in used for t in _tensors(made[node])}
        parameters = [self.parameter_of[s] for s in sources if s in self.parameter_of]
        cost = Cost(
            median(forward_ms),
            median(backward_ms) if backward_ms else 0.0,
            float(sum(t.nbytes for t in outputs.values())),
            float(self._count(parameters)),
            float(self._count(saved.storages())),
        )
        self.alive.append(saved)
        return cost

    def _enter(self, source: fx.Node) -> Value:
        """A value as a part by itself sees it: tensors of other parts without their history."""
        if source in self.parameter_of:
            return self.parameter_of[source]
        if source.op != "call_function":
            return self.values[source]
        return _map(_detached, self.values[source])

    def _count(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of storages that have not been counted yet."""
        new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        new = {address: n for address, n in new.items() if address not in self.counted}
        self.counted |= set(new)
        return sum(new.values())


def _execute(part: Sequence[fx.Node], given: Mapping[fx.Node, Value]) -> dict[fx.Node, Value]:
    """Run the operators of a part."""
    values = dict(given)
    for node in part:
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        assert callable(node.target)
        values[node] = node.target(*args, **kwargs)
    return values


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Value) -> Value:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(function, v) for v in value)
    return value


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _tensors(value: Value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    for device in _cuda(tensors):
        torch.cuda.synchronize(device)


def _cuda(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return list({t.device for t in tensors if t.device.type == "cuda"})
