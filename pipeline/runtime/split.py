"""Backward in two parts: first the gradients of the inputs, later those of the parameters.

In:  the roots of a graph and the edges of its inputs.
Out: `backward_input` gives gradients of the inputs and a `Rest`; `backward_weight` does what is left.

Nodes from which an input can be reached are run in the first part, each computing only what leads there.
Where a branch without inputs hangs on such a node, the gradient that came to the node is kept. The second
part runs the node again for that branch alone, and then the branch down to its parameters. So no work is done
twice, except by nodes that cannot compute a part alone, such as functions written in Python.

A branch that hangs on several nodes, such as a parameter that is used twice, would be counted by more than
one of them; then the second part is a whole backward pass that stops at the parameters.

Source: Qi et al., Zero Bubble Pipeline Parallelism, section 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class Rest:
    """What the second part needs.

    Attributes:
        roots: Where backward enters.
        given: Their gradients.
        branches: For each node on the way to an input, the branches without inputs that hang on it.
        arrived: The gradients that came to those nodes.
    """

    roots: Sequence[GradientEdge]
    given: Sequence[torch.Tensor]
    branches: dict[Node, list[GradientEdge]] = field(default_factory=dict)
    arrived: dict[Node, Gradients] = field(default_factory=dict)


def backward_input(
    roots: Sequence[GradientEdge], inputs: Sequence[GradientEdge], given: Sequence[torch.Tensor]
) -> tuple[Gradients, Rest]:
    """Gradients of the inputs; the graph stays for `backward_weight`."""
    rest = Rest(roots, given)
    rest.branches = _branches(roots, {edge.node for edge in inputs})
    hooks = [node.register_prehook(_keep(rest.arrived, node)) for node in rest.branches]
    try:
        found = torch.autograd.grad(roots, list(inputs), given, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(found), rest


def backward_weight(rest: Rest, parameters: Sequence[nn.Parameter]) -> None:
    """Add up the gradients of parameters."""
    learning = [p for p in parameters if p.requires_grad]
    if not learning or not rest.roots:
        return
    if not rest.branches or len(rest.arrived) < len(rest.branches):
        torch.autograd.backward(rest.roots, rest.given, inputs=learning)
        return
    edges: list[GradientEdge] = []
    gradients: list[torch.Tensor] = []
    for node, branches in rest.branches.items():
        entered = [(GradientEdge(node, i), g) for i, g in enumerate(rest.arrived[node]) if g is not None]
        found = torch.autograd.grad(
            [edge for edge, _ in entered],
            branches,
            [g for _, g in entered],
            retain_graph=True,
            allow_unused=True,
        )
        for branch, g in zip(branches, found, strict=True):
            if g is not None:
                edges.append(branch)
                gradients.append(g)
    torch.autograd.backward(edges, gradients)


def _branches(roots: Sequence[GradientEdge], inputs: set[Node]) -> dict[Node, list[GradientEdge]]:
    """Branches without inputs, by the node that they hang on; none at all if that isn't one node each."""
    order = list(_inputs_last(root.node for root in roots))
    leads: dict[Node, bool] = {}
    for node in order:
        leads[node] = node in inputs or any(leads[child] for child, _ in _next(node))
    if not all(leads[root.node] for root in roots):
        return {}
    parents = Counter(child for node in order for child in {c for c, _ in _next(node)})
    found: dict[Node, dict[tuple[Node, int], None]] = {}
    for node in order:
        if not leads[node] or node in inputs:
            continue
        for child, i in _next(node):
            if not leads[child]:
                if parents[child] > 1:
                    return {}
                found.setdefault(node, {})[child, i] = None
    return {node: [GradientEdge(*branch) for branch in branches] for node, branches in found.items()}


def _inputs_last(roots: Iterator[Node]) -> Iterator[Node]:
    """All nodes that can be reached, each after those that it leads to."""
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in _next(node) if child not in done]


def _next(node: Node) -> list[tuple[Node, int]]:
    return [(child, i) for child, i in node.next_functions if child is not None]


def _keep(arrived: dict[Node, Gradients], node: Node) -> Callable[[Any], None]:
    def hook(gradients: Gradients) -> None:
        arrived[node] = tuple(gradients)

    return hook
