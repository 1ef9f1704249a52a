"""A picture of a placement: the operations in layers, coloured by backend (as Collage's figure 2.12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx

from placement.errors import PlacementError
from placement.graph import OpGraph, bits
from placement.placements import Placement

ROWS = 40
"""Operations in a column before the picture continues in the next one."""


def draw(graph: OpGraph, placement: Placement, path: Path) -> None:
    """Draws a placement to a file; its suffix says the format.

    Raises:
        PlacementError: if matplotlib is missing or doesn't know the format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise PlacementError("drawing needs matplotlib: pip install 'coexec[draw]'.") from error
    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    formats = canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise PlacementError(f"{path} has no suffix for a picture; use one of {', '.join(sorted(formats))}.")
    position = _layout(graph)
    columns = 1 + max(x for x, _ in position.values())
    figure.set_size_inches(min(40.0, 2.2 * columns + 2), min(24.0, 0.28 * ROWS + 1.5))
    axes = figure.add_subplot()
    axes.set_axis_off()
    colours = _colours(placement.backends())
    for op in graph.ops:
        for i in bits(graph.reads[op.index]):
            axes.annotate(
                "",
                xy=position[op.index],
                xytext=position[i],
                arrowprops={"arrowstyle": "-", "color": "0.75", "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
                zorder=1,
            )
    for number, part in enumerate(placement.parts):
        for i in bits(part.mask):
            axes.text(
                *position[i],
                f"{graph.ops[i].name} {number}",
                ha="center",
                va="center",
                fontsize=5,
                zorder=2,
                bbox={"boxstyle": "round,pad=0.2", "fc": colours[part.backend], "ec": "0.3", "lw": 0.4},
            )
    xs, ys = zip(*position.values(), strict=True)
    axes.set_xlim(min(xs) - 0.6, max(xs) + 0.6)
    axes.set_ylim(min(ys) - 1, max(ys) + 1)
    axes.legend(
        handles=[Patch(fc=c, ec="0.3", label=_label(placement, b)) for b, c in colours.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.06),
        ncols=len(colours),
        fontsize=7,
        frameon=False,
    )
    figure.savefig(path, dpi=200, bbox_inches="tight")


def _label(placement: Placement, backend: str) -> str:
    parts = [p for p in placement.parts if p.backend == backend]
    operations = sum(p.mask.bit_count() for p in parts)
    return f"{backend}: {operations} operations in {len(parts)} parts"


def _colours(backends: tuple[str, ...]) -> dict[str, Any]:
    from matplotlib import colormaps

    palette = colormaps["Set3"].colors  # type: ignore[attr-defined]
    return {name: palette[i % len(palette)] for i, name in enumerate(backends)}


def _layout(graph: OpGraph) -> dict[int, tuple[float, float]]:
    """Depth downwards, what has equal depth side by side; deep graphs continue in the next column."""
    directed: nx.DiGraph[int] = nx.DiGraph()
    directed.add_nodes_from(range(len(graph)))
    directed.add_edges_from((i, op.index) for op in graph.ops for i in bits(graph.reads[op.index]))
    layers = list(nx.topological_generations(directed))
    position: dict[int, tuple[float, float]] = {}
    left = 0.0
    for first in range(0, len(layers), ROWS):
        column = layers[first : first + ROWS]
        width = max(map(len, column))
        for row, layer in enumerate(column):
            for place, index in enumerate(sorted(layer)):
                position[index] = (left + place, -float(row))
        left += width
    return position
