"""Report: which segment went where, what it costs there and elsewhere, and what was measured in the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from placement.measuring.protocol import Measurement, is_tie
from placement.search.graph_level import Step


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the placement."""

    title: str
    """Its operations."""
    shapes: str
    ops: int
    """How many operations."""
    backend: str
    cost: Measurement | None
    """Of the part alone on its backend; None if it was measured only as part of the whole."""
    alternatives: dict[str, Measurement]
    """The same operations on other backends, as far as they were measured."""

    @property
    def ties(self) -> tuple[str, ...]:
        """Backends that cost the same within noise."""
        if self.cost is None:
            return ()
        return tuple(name for name, m in self.alternatives.items() if m.ok and is_tie(self.cost, m))


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time of optimize() went, in seconds."""

    capture_s: float
    op_level_s: float
    graph_level_s: float
    final_s: float
    compiling_s: float
    measuring_s: float
    measured: int
    """Measurements taken."""
    from_log: int
    """Measurements that the log had."""


@dataclass(frozen=True, slots=True)
class Report:
    """What optimize() did."""

    rows: tuple[Row, ...]
    chosen: str
    """Which candidate won the final comparison: `op-level`, `graph-level` or `single NAME`."""
    predicted_s: float
    """The op-level placement's cost by the additive model: predicted, not measured."""
    measured: dict[str, Measurement]
    """The candidates of the final comparison, end to end."""
    exact: bool
    """Whether the op-level search saw all covers by the candidates that were measured."""
    steps: tuple[Step, ...]
    """How the graph-level search went, generation by generation."""
    stopped: str
    """Why the graph-level search ended; empty if it didn't run."""
    times: Times
    notes: tuple[str, ...] = ()

    @property
    def measured_s(self) -> float:
        """The time of the placement that was returned, end to end, in seconds."""
        return self.measured[self.chosen].cost_s

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.chosen}: {len(self.rows)} parts, measured {_ms(self.measured_s)}, "
            f"op-level predicted {_ms(self.predicted_s)}"
        ]
        lines += _aligned(
            [
                ("part", "backend", "cost", "elsewhere"),
                *(
                    (f"{r.title} ({r.ops})", r.backend, _cost(r.cost), _elsewhere(r))
                    for r in _grouped(self.rows)
                ),
            ]
        )
        lines.append("end to end:")
        ranked = sorted(self.measured.items(), key=lambda item: item[1].cost_s)
        lines += _aligned(
            [(f"  {name}", _cost(m), "<-" if name == self.chosen else "") for name, m in ranked]
        )
        t = self.times
        lines.append(
            f"search: op-level {t.op_level_s:.1f} s, graph-level {t.graph_level_s:.1f} s"
            f"{f' ({self.stopped})' if self.stopped else ''}, final comparison {t.final_s:.1f} s; "
            f"{t.measured} costs measured, {t.from_log} from the log"
        )
        if not self.exact:
            lines.append("the op-level search left states out: there may be a cheaper cover")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _grouped(rows: tuple[Row, ...]) -> list[Row]:
    """Rows of equal work on one backend, shown once."""
    seen: dict[tuple[str, str, str], int] = {}
    first: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.title, row.shapes, row.backend)
        seen[key] = seen.get(key, 0) + 1
        first.setdefault(key, row)
    return [
        Row(
            f"{seen[k]} x {r.title}" if seen[k] > 1 else r.title,
            r.shapes,
            r.ops,
            r.backend,
            r.cost,
            r.alternatives,
        )
        for k, r in first.items()
    ]


def _elsewhere(row: Row) -> str:
    ties = row.ties
    parts = []
    for name, m in sorted(row.alternatives.items(), key=lambda item: item[1].cost_s):
        parts.append(f"{name} {_cost(m)}{' (tie)' if name in ties else ''}")
    return ", ".join(parts)


def _cost(m: Measurement | None) -> str:
    if m is None:
        return "?"
    if not m.ok:
        return m.status
    return _ms(m.cost_s) + (" unstable" if m.unstable else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
