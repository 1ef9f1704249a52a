"""A picture of a program's TraceGraph.

In:  a program's report (or the text of its key), and where to write.
Out: an SVG or PNG file; each box is a linear chain of events, each arrow an edge between chains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coexec.errors import OptionError
from coexec.explain import ProgramReport, explain
from coexec.tracegraph.graph import END, START, TraceGraph
from coexec.tracegraph.trace import Kind

if TYPE_CHECKING:
    import networkx as nx

#: Events that a box names before it only counts them.
_NAMED = 4


def draw(program: ProgramReport | str, path: str | os.PathLike[str]) -> str:
    """Draws the TraceGraph of a program.

    Args:
        program: a report from `explain()`, or its `key`.
        path: the file to write; its suffix is `.svg` or `.png`.

    Returns:
        The path.

    Raises:
        OptionError: if there is no such program, it has no TraceGraph yet, or the suffix is another.
        ImportError: if matplotlib is not installed (`pip install coexec[draw]`).
    """
    path = os.fspath(path)
    if not path.endswith((".svg", ".png")):
        raise OptionError(f"cannot draw to {path!r}: the suffix has to be .svg or .png")
    graph = _report(program).graph
    if graph is None:
        raise OptionError("the program has no TraceGraph: no iteration of it has been traced")
    import networkx as nx  # not above: see `tracegraph.order`
    from matplotlib.figure import Figure

    boxes, edges = _chains(graph)
    rank = {n: r for r, layer in enumerate(nx.topological_generations(edges)) for n in layer}
    layers: dict[int, list[int]] = {}
    for box in edges.nodes:
        layers.setdefault(rank[box], []).append(box)
    width = max(len(layer) for layer in layers.values())
    figure = Figure(figsize=(2.0 + 3.2 * width, 1.0 + 1.25 * len(layers)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-width / 2 - 0.2, width / 2 + 0.2)
    axes.set_ylim(-len(layers), 1)
    position = {
        box: (column - (len(layer) - 1) / 2, -float(r))
        for r, layer in layers.items()
        for column, box in enumerate(layer)
    }
    for source, target in edges.edges:
        long_way = rank[target] - rank[source] > 1
        axes.annotate(
            "",
            xy=position[target],
            xytext=position[source],
            arrowprops={
                "arrowstyle": "-|>",
                "color": "0.45",
                "shrinkA": 24,
                "shrinkB": 26,
                "connectionstyle": "arc3,rad=0.35" if long_way else "arc3",
            },
        )
    for box, (x, y) in position.items():
        fetches = any(graph.nodes[n].kind is Kind.FETCH for n in boxes[box])
        color = "#fdebc8" if fetches else "#dfe7f3" if box >= 0 else "0.9"
        style = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "0.3"}
        label = _label(graph, boxes[box], box)
        axes.text(x, y, label, ha="center", va="center", fontsize=8, family="monospace", bbox=style)
    figure.savefig(path)
    return path


def _report(program: ProgramReport | str) -> ProgramReport:
    if isinstance(program, ProgramReport):
        return program
    reports = {p.key: p for p in explain().programs}
    if program not in reports:
        raise OptionError(f"no program {program!r}; there are {', '.join(map(repr, reports)) or 'none yet'}")
    return reports[program]


def _chains(graph: TraceGraph) -> tuple[dict[int, list[int]], nx.DiGraph]:
    """Linear chains by their first node, and the edges between them."""
    import networkx as nx

    edges = nx.DiGraph((s, t) for s, targets in graph.edges.items() for t in targets)
    boxes: dict[int, list[int]] = {}
    head: dict[int, int] = {}
    for node in nx.topological_sort(edges):
        before = list(edges.predecessors(node))
        joins = node < 0 or len(before) != 1 or before[0] < 0 or edges.out_degree(before[0]) != 1
        head[node] = node if joins else head[before[0]]
        boxes.setdefault(head[node], []).append(node)
    between = nx.DiGraph()
    between.add_nodes_from(boxes)
    between.add_edges_from((head[s], head[t]) for s, t in edges.edges if head[s] != head[t])
    return {h: [n for n in nodes if n >= 0] for h, nodes in boxes.items()}, between


def _label(graph: TraceGraph, nodes: Sequence[int], head: int) -> str:
    if head < 0:
        return {START: "start", END: "end"}[head]
    names = [f"%{n} {graph.nodes[n].name}" for n in nodes]
    if len(names) > _NAMED + 1:
        names = [*names[: _NAMED - 1], f"... {len(names) - _NAMED} more", names[-1]]
    return "\n".join(names)
