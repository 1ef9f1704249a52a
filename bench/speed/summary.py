"""Tables and means of speed results, as the objects of their JSON record.

A mode's speed is eager's median step time over its own, both medians of the rounds' mean step times in one
run: above 1 is faster than eager.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from bench.spread import Spread, spread_of

Fields = dict[str, Any]
DETAILS = (
    "program",
    "mode",
    "step ms [p10, p90]",
    "first call s",
    "peak MB",
    "/ eager",
    "breaks",
    "recompiled",
    "traces",
    "fallbacks",
    "co-executed",
    "Python ms",
    "/ eager",
)


def title(result: Fields) -> str:
    """Return a mode's name with what runs its graph."""
    return f"{result['mode']} ({result['executor']})" if result["executor"] else str(result["mode"])


def by_program(results: Iterable[Fields]) -> dict[str, dict[str, Fields]]:
    """Return the results by program and title; the last of each counts."""
    out: dict[str, dict[str, Fields]] = {}
    for result in results:
        out.setdefault(result["program"], {})[title(result)] = result
    return out


def ran(result: Fields | None) -> bool:
    """Return whether there are rounds of it, and no error."""
    return result is not None and not result["error"] and bool(result["round_ms"])


def speed(result: Fields, eager: Fields) -> float:
    """Return how many times as fast as eager it was."""
    return spread_of(eager["round_ms"]).median / spread_of(result["round_ms"]).median


def speed_rows(results: Iterable[Fields]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: a program a row, a mode a column; at the bottom their geometric means."""
    programs = by_program(results)
    columns = [t for t in dict.fromkeys(t for modes in programs.values() for t in modes) if t != "eager"]
    rows = []
    for program, modes in programs.items():
        eager = modes.get("eager")
        if eager is None or not ran(eager):
            rows.append([program, "fails", *("" for _ in columns)])
            continue
        cells = [_speed_cell(modes.get(column), eager) for column in columns]
        rows.append([program, str(spread_of(eager["round_ms"])), *cells])
    means = []
    for column in columns:
        speeds = _speeds(programs, lambda modes, column=column: modes.get(column))  # type: ignore[misc]
        mean = f"**{statistics.geometric_mean(speeds.values()):.2f}** of {len(speeds)}" if speeds else ""
        means.append(mean)
    return ["program", "eager ms", *columns], [*rows, ["**geometric mean**", "", *means]]


def _speed_cell(result: Fields | None, eager: Fields) -> str:
    if result is None:
        return ""
    if not ran(result):
        return "fails"
    unit, spread = spread_of(eager["round_ms"]).median, spread_of(result["round_ms"])
    return str(Spread(unit / spread.median, unit / spread.p90, unit / spread.p10))


def detail_rows(results: Iterable[Fields]) -> list[list[str]]:
    """Return a row for each program and mode under the head `DETAILS`."""
    rows = []
    for program, modes in by_program(results).items():
        eager = modes.get("eager")
        for name, result in modes.items():
            if not ran(result):
                rows.append([program, name, "fails", *("" for _ in DETAILS[3:])])
                continue
            known = eager if eager is not None and ran(eager) else None
            memory = None if known is None else result["peak_rss_mb"] / known["peak_rss_mb"]
            share = python_share(result, known)
            rows.append(
                [
                    program,
                    name,
                    str(spread_of(result["round_ms"])),
                    f"{result['first_call_s']:.2f}",
                    f"{result['peak_rss_mb']:.0f}",
                    _number(memory, ".2f"),
                    _number(result.get("graph_breaks"), "d"),
                    _number(result.get("recompilations"), "d"),
                    _number(result["traces"], "d"),
                    _number(result["fallbacks"], "d"),
                    _number(result["coexec_share"], ".0%"),
                    _number(result.get("python_ms"), ".2f"),
                    _number(share, ".2f"),
                ]
            )
    return rows


def python_share(result: Fields, eager: Fields | None) -> float | None:
    """Return the PythonRunner's own time as a share of eager's whole step, if most steps were co-executed."""
    co_executed = result.get("coexec_share")
    if eager is None or result.get("python_ms") is None or (co_executed is not None and co_executed < 0.5):
        return None
    share: float = result["python_ms"] / spread_of(eager["round_ms"]).median
    return share


def conclusions(results: Iterable[Fields]) -> list[str]:
    """Return what the speeds come to, a sentence each."""
    programs = by_program(results)
    best = _speeds(programs, lambda modes: _fastest(modes, "coexec"))
    compiled = _speeds(programs, lambda modes: _fastest(modes, "compile:"))
    lazy = _speeds(programs, lambda modes: _fastest(modes, "lazy"))
    smooth = {p for p in compiled if not _interrupted(_fastest(programs[p], "compile:"))}
    over_compile = {p: best[p] / compiled[p] for p in compiled if p in best}
    shares = {
        program: share
        for program, modes in programs.items()
        if (share := python_share(_fastest(modes, "coexec") or {}, modes.get("eager"))) is not None
    }
    lines = [
        _sentence("coexec over eager", best),
        _sentence(
            "coexec over torch.compile, without graph breaks and recompilations",
            {p: r for p, r in over_compile.items() if p in smooth},
        ),
        _sentence(
            "coexec over torch.compile, with graph breaks or recompilations",
            {p: r for p, r in over_compile.items() if p not in smooth},
        ),
        _sentence("coexec over lazy", {p: best[p] / lazy[p] for p in lazy if p in best}),
    ]
    if shares:
        most = max(shares, key=lambda p: shares[p])
        lines.append(
            f"PythonRunner's own time: median {statistics.median(shares.values()):.2f} of eager's step,"
            f" at most {shares[most]:.2f} ({most})"
        )
    return [line for line in lines if line]


def _speeds(
    programs: dict[str, dict[str, Fields]], choose: Callable[[dict[str, Fields]], Fields | None]
) -> dict[str, float]:
    """The speed of one result a program, where it and eager ran."""
    chosen = {program: (choose(modes), modes.get("eager")) for program, modes in programs.items()}
    return {
        program: speed(result, eager)
        for program, (result, eager) in chosen.items()
        if result is not None and eager is not None and ran(result) and ran(eager)
    }


def _fastest(modes: dict[str, Fields], prefix: str) -> Fields | None:
    candidates = [r for r in modes.values() if r["mode"].startswith(prefix) and ran(r)]
    return min(candidates, key=lambda r: spread_of(r["round_ms"]).median, default=None)


def _interrupted(result: Fields | None) -> bool:
    return result is not None and bool(result["graph_breaks"] or result["recompilations"])


def _sentence(what: str, ratios: dict[str, float]) -> str:
    if not ratios:
        return ""
    least = min(ratios, key=lambda p: ratios[p])
    mean = statistics.geometric_mean(ratios.values())
    return (
        f"{what} (the fastest of each): geometric mean {mean:.2f} of {len(ratios)} programs,"
        f" least {ratios[least]:.2f} ({least})"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
