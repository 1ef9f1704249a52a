"""A module as a graph of its parts, through torch.export.

In:  a module and example inputs.
Out: `capture` gives the `ModelGraph`; `trace` also what each node consists of, for `pipeline.profiling`.

A node is a run of consecutive operators that belong to the same submodule. Since they are consecutive in an
order in which everything comes after what it reads, the nodes can't form a cycle, however modules are nested
or called again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.export import ExportedProgram

from pipeline.errors import GraphError
from pipeline.graph import ModelGraph, Node


@dataclass(frozen=True, slots=True)
class Traced:
    """A captured module.

    Attributes:
        graph: Its parts and the edges between them.
        program: Its operators.
        parts: The operators of each node of the graph.
    """

    graph: ModelGraph
    program: ExportedProgram
    parts: tuple[tuple[torch.fx.Node, ...], ...]


def capture(
    module: nn.Module,
    example_inputs: Sequence[torch.Tensor],
    *,
    depth: int | None = 1,
    name: str | None = None,
) -> ModelGraph:
    """The parts of a module and how data flow between them.

    Args:
        module: The module; it is not run and not changed.
        example_inputs: What its `forward` takes.
        depth: How deep to look into modules that contain modules: 1 gives the module's children as nodes, 2
            theirs; None gives single operators.
        name: Of the model; the module's class when left out.

    Raises:
        GraphError: The module can't be exported.
    """
    return trace(module, example_inputs, depth=depth, name=name).graph


def trace(
    module: nn.Module,
    example_inputs: Sequence[torch.Tensor],
    *,
    depth: int | None = 1,
    name: str | None = None,
) -> Traced:
    """As `capture`, with the operators."""
    name = name or type(module).__name__
    try:
        program = torch.export.export(module, tuple(example_inputs), strict=False)
    except Exception as error:  # whatever the user's forward raises when it is traced
        raise GraphError(
            f"{name} can't be captured: {error}. torch.export needs a forward without control flow that"
            " depends on data."
        ) from error
    operators = [node for node in program.graph.nodes if node.op == "call_function"]
    if depth is None:
        runs = [(node.name, (node,)) for node in operators]
    else:
        runs = [(path, tuple(run)) for path, run in groupby(operators, lambda node: _path(node, depth))]
    ids = _unique([path or run[0].name for path, run in runs])
    owner = {node: i for i, (_, run) in zip(ids, runs, strict=True) for node in run}
    edges = dict.fromkeys(
        (owner[source], owner[node])
        for node in operators
        for source in node.all_input_nodes
        if source in owner and owner[source] != owner[node]
    )
    nodes = tuple(Node(i, _description(run)) for i, (_, run) in zip(ids, runs, strict=True))
    return Traced(ModelGraph(name, nodes, tuple(edges)), program, tuple(run for _, run in runs))


def _path(node: torch.fx.Node, depth: int) -> str:
    """The submodule that an operator belongs to, at most so deep; empty for the module itself."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return str(stack[min(depth, len(stack) - 1)]) if stack else ""


def _unique(names: Sequence[str]) -> list[str]:
    """The names, with a number after the second and later ones that are alike."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def _description(run: Sequence[torch.fx.Node]) -> str:
    counts = Counter(str(node.target).removeprefix("aten.").split(".")[0] for node in run)
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
