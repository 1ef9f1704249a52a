"""One stage of a model and its passes: forward, backward, backward in two parts, and forward again.

In:  activations of a micro-batch, later the gradients of what the stage made of them.
Out: its outputs, later the gradients of its inputs. Gradients of parameters add up in their `.grad`.

Between passes only what autograd saved is held, in `Saved`, and the edges of the graph by which backward
enters it: neither inputs nor outputs are kept for their own sake. Nothing here knows about other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeline.runtime.entry import Entry
from pipeline.runtime.errors import RunError
from pipeline.runtime.saved import Saved
from pipeline.runtime.split import Rest, backward_input, backward_weight
from pipeline.runtime.storages import addresses
from pipeline.runtime.weights import Weights

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class StageModule:
    """What runs as a stage.

    Attributes:
        module: Takes the outputs of the stages before it, in the order of their numbers, and then its data;
            gives a tensor or a tuple of tensors, whose first dimension is the samples. A stage that nothing
            follows gives its loss: one number, the mean over its samples.
        optimizer: Of the module's parameters; None for a stage that doesn't learn.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None


@dataclass(slots=True)
class _Graph:
    """A micro-batch between forward and backward.

    Attributes:
        saved: What is held of it.
        data: What the forward pass read besides activations.
        version: Of the weights.
        entry: Where backward leaves the gradients of the inputs.
        roots: By which backward enters, one for each floating-point output; None if that doesn't depend on
            anything that learns. Empty while the micro-batch is to be recomputed.
        rest: What the first part of backward leaves to the second.
    """

    saved: Saved
    data: Tensors
    version: int
    entry: Entry
    roots: tuple[GradientEdge | None, ...] = ()
    rest: Rest | None = None


class StageRunner:
    """Runs the passes of one stage, and holds what is between them."""

    def __init__(
        self, weights: Weights, random: Callable[[int], AbstractContextManager[None]], device: torch.device
    ) -> None:
        """A stage that holds nothing yet.

        Args:
            weights: The stage's weights.
            random: Seeds the generators for a micro-batch.
            device: Where the stage computes.
        """
        self.weights = weights
        self.random = random
        self.device = device
        self.graphs: dict[int, _Graph] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held between forward and backward, without what is away."""
        return sum(graph.saved.nbytes for graph in self.graphs.values())

    def saved(self, k: int) -> Saved:
        """What is held of a micro-batch."""
        return self.graphs[k].saved

    def forward(self, k: int, inputs: Tensors, data: Tensors, version: int, *, again: bool) -> Tensors:
        """The outputs for a micro-batch; if it is run `again` later, only its input is kept."""
        if not again:
            self.graphs[k], outputs = self._forward(k, inputs, data, version)
            return outputs
        saved = self._saved(data)
        saved.add(inputs)
        with self.weights.using(version), self.random(k), torch.no_grad():
            outputs = _tensors(self.weights.module(*inputs, *data))
        self.graphs[k] = _Graph(saved, data, version, Entry(inputs))
        return outputs

    def trial(self, inputs: Tensors, data: Tensors) -> tuple[Tensors, tuple[int, ...]]:
        """The outputs, and bytes of each storage that is saved; nothing is held and no buffer changed."""
        with self._unchanged_buffers():
            graph, outputs = self._forward(-1, inputs, data, self.weights.current)
        return outputs, graph.saved.sizes

    def recompute(self, k: int) -> None:
        """Run the forward pass again and keep what it saves."""
        graph = self.graphs[k]
        inputs = tuple(graph.saved.tensors())
        with self._unchanged_buffers():  # running statistics have been updated the first time
            self.graphs[k], _ = self._forward(k, inputs, graph.data, graph.version)

    def backward(self, k: int, gradients: Tensors) -> Tensors:
        """Gradients of the inputs; those of parameters are added up."""
        graph = self.graphs.pop(k)
        roots, given = _pair(graph.roots, gradients)
        if roots:
            with self.weights.using(graph.version):
                torch.autograd.backward(roots, given)
        graph.saved.clear()
        return graph.entry.gradients()

    def backward_input(self, k: int, gradients: Tensors) -> Tensors:
        """Gradients of the inputs alone; what is saved stays for `backward_weight`."""
        graph = self.graphs[k]
        roots, given = _pair(graph.roots, gradients)
        with self.weights.using(graph.version):
            if roots and graph.entry.edges:
                graph.entry.found, graph.rest = backward_input(roots, graph.entry.edges, given)
            else:
                graph.rest = Rest(roots, given)
        return graph.entry.gradients()

    def backward_weight(self, k: int) -> None:
        """Add up the gradients of parameters."""
        graph = self.graphs.pop(k)
        assert graph.rest is not None
        with self.weights.using(graph.version):
            backward_weight(graph.rest, self.weights.parameters)
        graph.saved.clear()

    def _forward(self, k: int, inputs: Tensors, data: Tensors, version: int) -> tuple[_Graph, Tensors]:
        graph = _Graph(self._saved(data), data, version, Entry(inputs))
        with self.weights.using(version), self.random(k), torch.enable_grad(), graph.saved.hooks():
            outputs = _tensors(self.weights.module(*graph.entry.enter(inputs), *data))
        graph.roots = tuple(
            get_gradient_edge(t) if t.requires_grad else None for t in outputs if t.is_floating_point()
        )
        graph.saved.finish(self.weights.storages())
        return graph, tuple(t.detach() for t in outputs)

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        buffers = [(b, b.clone()) for b in self.weights.module.buffers()]
        yield
        for buffer, before in buffers:
            buffer.data.copy_(before)

    def _saved(self, data: Tensors) -> Saved:
        return Saved(self.weights.storages() | addresses(data), self.weights.frozen)


def _tensors(output: Any) -> Tensors:
    """The outputs of a module as a tuple."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, tuple | list) and output and all(isinstance(t, torch.Tensor) for t in output):
        return tuple(output)
    raise RunError(
        f"a stage must give a tensor or a tuple of tensors; its module gave a {type(output).__name__}."
    )


def _pair(
    roots: Sequence[GradientEdge | None], gradients: Tensors
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Roots that anything depends on, with their gradients."""
    pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root is not None]
    return [root for root, _ in pairs], [g for _, g in pairs]
