"""Tables and plots of placement records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.spread import spread_of
from bench.tables import plain_table
from bench.workloads import MODELS

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
    texts = [f"{name}, batch {batch}\n{_table(modes)}" for (name, batch), modes in groups_of(results).items()]
    rows = gains(results)
    return "\n\n".join([*texts, plain_table(GAINS, rows)] if rows else texts)


GAINS = (
    "workload",
    "placed ms (p10)",
    "chosen",
    "best single / placed",
    "best of eager and compile / placed",
    "op-level search s: cold / log",
    "graph-level s",
)
"""The head of the table that `gains` makes the rows of."""


def gains(results: Rows) -> list[tuple[str, ...]]:
    """What placement gains over the best of the others, for each workload and in the mean."""
    rows: list[tuple[str, ...]] = []
    ratios: dict[str, list[tuple[float, float]]] = {"models": [], "blocks of training programs": []}
    for (name, batch), modes in groups_of(results).items():
        placed = costs(modes, "placement:two-level")
        singles, others = costs(modes, "single:"), {**costs(modes, "eager"), **costs(modes, "compile:")}
        if not (placed and singles and others):
            continue
        ours = placed["placement:two-level"]
        best_single, best_other = min(singles, key=singles.__getitem__), min(others, key=others.__getitem__)
        ratio = (singles[best_single] / ours, others[best_other] / ours)
        ratios["models" if name in MODELS else "blocks of training programs"].append(ratio)
        op, final = modes["placement:op"], modes["placement:two-level"]
        rows.append(
            (
                f"{name} {batch}",
                f"{ours:.2f}",
                final["chosen"],
                f"{ratio[0]:.2f} ({best_single.removeprefix('single:')})",
                f"{ratio[1]:.2f} ({best_other})",
                f"{op['search_cold_s']:.0f} / {op['search_with_log_s']:.1f}",
                f"{final['search_graph_level_s']:.0f}",
            )
        )
    for kind, found in ratios.items():
        if found:
            over_single, over_torch = np.exp(np.log(np.array(found)).mean(0))
            mean = f"geometric mean of {len(found)} {kind}"
            rows.append((mean, "", "", f"{over_single:.3f}", f"{over_torch:.3f}", "", ""))
    return rows


def is_ablation(mode: str) -> bool:
    """Whether a mode is the placement with some of the backends."""
    return mode.startswith("ablation:")


def ablations(results: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: eager's cost over that of the placement as backends are added one by one."""
    groups = {
        key: modes for key, modes in groups_of(results).items() if any(is_ablation(mode) for mode in modes)
    }
    added = dict.fromkeys(m for modes in groups.values() for m in modes if is_ablation(m))
    rows = []
    for (name, batch), modes in groups.items():
        own, eager = costs(modes, "ablation:"), costs(modes, "eager")["eager"]
        rows.append([f"{name} {batch}", *(f"{eager / own[m]:.2f}" if m in own else "-" for m in added)])
    return ["", *(m.removeprefix("ablation:") for m in added)], rows


def speeds(results: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: eager's cost over that of each mode, for each workload."""
    groups = groups_of(results)
    shown = dict.fromkeys(m for modes in groups.values() for m in modes if not is_ablation(m))
    rows = []
    for mode in shown:
        cells = [costs(modes, mode).get(mode) for modes in groups.values()]
        eager = [costs(modes, "eager")["eager"] for modes in groups.values()]
        rows.append(
            [mode, *("-" if c is None else f"{e / c:.2f}" for c, e in zip(cells, eager, strict=True))]
        )
    return ["", *(f"{name} {batch}" for name, batch in groups)], rows


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
    shown = list(dict.fromkeys(m for modes in groups.values() for m in modes if not is_ablation(m)))
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
