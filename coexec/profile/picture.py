"""A timeline as a picture: a lane for each runner, time from left to right.

Source: the four kinds of time are those of Terra, figure 3.11.
"""

from __future__ import annotations

from pathlib import Path

from coexec.profile.timeline import Span, Timeline

_COLORS = {
    ("PythonRunner", False): "#4c72b0",
    ("PythonRunner", True): "#c9d5ea",
    ("GraphRunner", False): "#dd8452",
    ("GraphRunner", True): "#f6dcca",
}


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Writes a PNG (or whatever the path's suffix names).

    Raises:
        ImportError: if matplotlib is not installed (`pip install coexec[draw]`).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes: list[tuple[str, str, tuple[Span, ...]]] = [("PythonRunner", "PythonRunner", timeline.python)]
    for key, spans in timeline.graph.items():
        lanes.append(
            ("GraphRunner", f"GraphRunner\n{key}" if len(timeline.graph) > 1 else "GraphRunner", spans)
        )
    figure = Figure(figsize=(11.0, 1.6 + 0.7 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for row, (runner, _, spans) in enumerate(lanes):
        for stalled in (False, True):
            bars = [(s.begin_s * 1e3, s.length_s * 1e3) for s in spans if s.stalled == stalled]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=_COLORS[runner, stalled])
    for iteration in timeline.iterations:
        axes.axvline(iteration.begin_s * 1e3, color="0.4", linewidth=0.8)
        axes.text(iteration.begin_s * 1e3, -0.5, f" {iteration.title}", fontsize=7, va="bottom", clip_on=True)
    axes.set_yticks(range(len(lanes)), [name for _, name, _ in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.75)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = [
        Patch(color=color, label=f"{runner} {'stall' if stalled else 'exec'}")
        for (runner, stalled), color in _COLORS.items()
    ]
    figure.legend(handles=kinds, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
