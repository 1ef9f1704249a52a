"""Tables and plots of placement records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.spread import spread_of
from bench.tables import plain_table

Rows = Sequence[Mapping[str, Any]]


def groups_of(results: Rows) -> dict[tuple[str, int], dict[str, Mapping[str, Any]]]:
    """Results by workload and batch size, then by mode."""
    out: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for result in results:
        out.setdefault((result["program"], result["batch"]), {})[result["mode"]] = result
    return out


def costs(modes: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Costs of the modes whose names begin with a prefix: the 10th percentile in milliseconds."""
    return {
        mode: spread_of(r["step_ms"]).p10
        for mode, r in modes.items()
        if mode.startswith(prefix) and r["step_ms"]
    }


def summary(results: Rows) -> str:
    """A table for each workload, and one of what placement gains over the best of the others."""
    texts, rows, gains = [], [], []
    for (name, batch), modes in groups_of(results).items():
        texts.append(f"{name}, batch {batch}\n{_table(modes)}")
        placed = costs(modes, "placement:two-level")
        singles, others = costs(modes, "single:"), {**costs(modes, "eager"), **costs(modes, "compile:")}
        if not (placed and singles and others):
            continue
        ours = placed["placement:two-level"]
        best_single, best_other = min(singles, key=singles.__getitem__), min(others, key=others.__getitem__)
        gain = (singles[best_single] / ours, others[best_other] / ours)
        gains.append(gain)
        op, final = modes["placement:op"], modes["placement:two-level"]
        rows.append(
            (
                f"{name} {batch}",
                f"{ours:.2f}",
                final["chosen"],
                f"{gain[0]:.2f} ({best_single.removeprefix('single:')})",
                f"{gain[1]:.2f} ({best_other})",
                f"{op['search_cold_s']:.0f} / {op['search_with_log_s']:.1f}",
                f"{final['search_graph_level_s']:.0f}",
            )
        )
    if gains:
        over_single, over_torch = np.exp(np.log(np.array(gains)).mean(0))
        rows.append(("geometric mean", "", "", f"{over_single:.3f}", f"{over_torch:.3f}", "", ""))
        head = (
            "workload",
            "placed ms (p10)",
            "chosen",
            "best single / placed",
            "best of eager and compile / placed",
            "op-level search s: cold / log",
            "graph-level s",
        )
        texts.append(plain_table(head, rows))
    return "\n\n".join(texts)


def _table(modes: Mapping[str, Mapping[str, Any]]) -> str:
    eager = spread_of(modes["eager"]["step_ms"]).p10
    rows = []
    for mode, result in modes.items():
        if result["error"]:
            rows.append((mode, "failed", "", "", result["error"][:80]))
            continue
        spread = spread_of(result["step_ms"])
        rows.append(
            (
                mode,
                str(spread),
                f"{eager / spread.p10:.2f}",
                f"{result['first_call_s']:.1f}",
                f"{result['relative_error']:.0e}",
            )
        )
    return plain_table(("mode", "ms [p10, p90]", "eager / this", "first call s", "relative error"), rows)


def speed_plot(results: Rows, path: Path) -> None:
    """Bars: how many times faster than eager each mode is, for each workload."""
    from matplotlib.figure import Figure

    groups = groups_of(results)
    shown = list(
        dict.fromkeys(m for modes in groups.values() for m in modes if not m.startswith("ablation:"))
    )
    figure = Figure(figsize=(2 + 2.2 * len(groups), 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.85 / len(shown)
    for number, mode in enumerate(shown):
        heights = []
        for modes in groups.values():
            own, eager = costs(modes, mode), costs(modes, "eager")
            heights.append(eager["eager"] / own[mode] if mode in own else 0.0)
        at = np.arange(len(groups)) + (number - len(shown) / 2) * width
        axes.bar(at, heights, width, label=mode, hatch="//" if mode.startswith("placement") else None)
    axes.axhline(1, color="0.5", lw=0.8)
    axes.set_xticks(range(len(groups)), [f"{name}\nbatch {batch}" for name, batch in groups])
    axes.set_ylabel("speed relative to eager")
    axes.legend(fontsize=6, ncols=3)
    figure.savefig(path, dpi=150)


def convergence_plot(results: Rows, path: Path) -> None:
    """Lines: the best placement of the graph-level search over time, relative to the op-level one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, batch), modes in groups_of(results).items():
        steps = modes.get("placement:two-level", {}).get("report", {}).get("steps", [])
        if steps:
            times = [0.0, *(s["elapsed_s"] for s in steps)]
            axes.step(times, [1.0, *(1 / s["best"] for s in steps)], where="post", label=f"{name} {batch}")
    axes.set_xlabel("seconds of graph-level search")
    axes.set_ylabel("speed relative to op-level placement")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
