"""A result as a picture: one row a rank, one box a computation."""

from __future__ import annotations

from pathlib import Path

from pipeline.actions import Compute, Kind
from pipeline.errors import PipelineError
from pipeline.simulator.result import Result

COLORS = {
    Kind.FORWARD: "#6baed6",
    Kind.BACKWARD: "#74c476",
    Kind.BACKWARD_INPUT: "#a1d99b",
    Kind.BACKWARD_WEIGHT: "#31a354",
    Kind.RECOMPUTE: "#c6dbef",
}

LABELS = 400
"""With more boxes than this, micro-batch numbers would not be legible and are left out."""


def draw(result: Result, path: str | Path) -> None:
    """Draw the schedule to a file; its suffix says in which format (png, svg, pdf).

    Raises:
        PipelineError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise PipelineError("drawing needs matplotlib: pip install matplotlib.") from error
    ranks = len(result.program.ranks)
    figure = Figure(figsize=(14, 1.5 + 0.4 * min(ranks, 60)), layout="constrained")
    axes = figure.subplots()
    boxes: dict[tuple[int, Kind], list[tuple[float, float]]] = {}
    labels: list[tuple[float, int, int]] = []
    for event in result.events:
        if isinstance(event.action, Compute):
            box = (event.start, event.end - event.start)
            boxes.setdefault((event.rank, event.action.kind), []).append(box)
            labels.append(((event.start + event.end) / 2, event.rank, event.action.micro_batch))
    for (r, kind), row in boxes.items():
        axes.broken_barh(row, (r - 0.45, 0.9), facecolors=COLORS[kind], edgecolors="white", linewidth=0.3)
    if len(labels) <= LABELS:
        for middle, r, micro_batch in labels:
            axes.text(middle, r, str(micro_batch), ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, result.makespan_s or 1), ylim=(ranks - 0.5, -0.5), xlabel="seconds", ylabel="rank")
    axes.set_title(f"{result.makespan_s:.4g} s, bubble {100 * result.bubble:.1f} %")
    used = {kind for _, kind in boxes}
    handles = [
        Patch(color=color, label=kind.name.lower().replace("_", " "))
        for kind, color in COLORS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(len(handles), 1))
    figure.savefig(path, dpi=120)
