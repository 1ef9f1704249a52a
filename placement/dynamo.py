"""`torch.compile(model, backend="placement")`: each graph that Dynamo captures is placed.

Forward and backward graphs alike; weights are inputs of these graphs, not constants, so that training
sees their changes. Where weights are fixed, `placement.optimize` has more to gain.

    torch.compile(model, backend="placement", dynamic=False, options={"budget_s": 60})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from placement._private import compile_with_autograd
from placement.capture import capture_graph
from placement.errors import PlacementError
from placement.graph import TensorSpec
from placement.optimize import optimize

OPTIONS = frozenset(
    {"backends", "budget_s", "log", "level", "fuel", "seed", "allocator", "protocol", "timeout_s"}
)
"""What `options` may hold: those arguments of `optimize`."""


def placement_backend(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as `torch.compile` calls it.

    Raises:
        PlacementError: if an option is unknown.
    """
    given = dict(options or {})
    unknown = set(given) - OPTIONS
    if unknown:
        raise PlacementError(
            f"the backend placement has no option {', '.join(sorted(unknown))}. "
            f"It has {', '.join(sorted(OPTIONS))}."
        )
    return compile_with_autograd(module, example_inputs, lambda graph, inputs: place_graph(graph, **given))


def captured_graphs(
    found: list[tuple[GraphModule, list[torch.Tensor]]], module: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """A backend that places nothing: it notes each graph with the inputs of its first call, and runs it."""

    def note(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        noted = False

        def run(*given: torch.Tensor) -> Any:
            nonlocal noted
            if not noted:
                noted = True
                found.append((graph, [TensorSpec.of(t).lay_out(t.detach()) for t in given]))
            return graph.forward(*given)

        return run

    return compile_with_autograd(module, example_inputs, note)


def place_graph(module: GraphModule, **options: Any) -> Callable[..., Any]:
    """Places a flat graph of ATen operations, measured on made-up values of its inputs' shapes."""
    captured = capture_graph(module)
    if not len(captured.graph):
        return module.forward
    placed = optimize(module, [made_up(spec) for spec in captured.inputs], **options)
    return placed.function


def made_up(spec: TensorSpec) -> torch.Tensor:
    """Positive numbers below 1, and zeros for indices and masks: valid wherever the real ones are."""
    if not spec.dtype.is_floating_point:
        return spec.lay_out(torch.zeros(spec.shape))
    return spec.lay_out(torch.rand(spec.shape, generator=torch.Generator().manual_seed(0)))
