"""Print the README's table of results from the records of `speed`, or of `compare`.

Every record of the kind in the folder gives its rows, the newest of a program and mode, losing rows and
failures included. The table of `speed` has geometric means at the bottom, and what they come to below.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.options import say
from bench.speed.summary import conclusions, speed_rows
from bench.spread import spread_of
from bench.tables import markdown_table

RESULTS = Path(__file__).parents[1] / "results"
HEAD = (
    "program",
    "mode",
    "step ms [p10, p90]",
    "/ eager",
    "first call s",
    "peak GiB",
    "fallbacks / 1,000",
    "equal",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=RESULTS,
        help="where the records are (default: bench/results)",
    )
    parser.add_argument(
        "--of", choices=("speed", "compare"), help="which records (default: speed if there are any)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the table, then each machine and command behind it."""
    records = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    chosen = [options.of] if options.of else ["speed", "compare"]
    for command in chosen:
        mine = [r for r in records if r["command"].startswith(f"python -m bench {command} ")]
        if mine:
            say(speed_report(mine) if command == "speed" else report(mine))
            return 0
    writes = {"speed": "speed --out FILE.json", "compare": "compare PROGRAM --out FILE.json"}
    say(
        f"no records of {' or '.join(chosen)} in {options.folder};"
        f" {' or '.join(f'python -m bench {writes[command]}' for command in chosen)} writes one"
    )
    return 1


def speed_report(records: list[dict[str, Any]]) -> str:
    """Return the table of speeds, what they come to, and their sources as Markdown.

    The newest record of a program counts: a speed is a ratio of two medians of one run.
    """
    newest: dict[str, dict[str, Any]] = {}
    for record in _oldest_first(records):
        for program in dict.fromkeys(result["program"] for result in record["results"]):
            newest.pop(program, None)  # newer ones come last
            newest[program] = record
    results = [r for program, record in newest.items() for r in record["results"] if r["program"] == program]
    sources = {record["command"]: _source(record) for record in newest.values()}
    lines = [f"- {line}" for line in conclusions(results)]
    return "\n".join([markdown_table(*speed_rows(results)), "", *lines, *sources.values()])


def report(records: list[dict[str, Any]]) -> str:
    """Return the table and its sources as Markdown."""
    latest: dict[tuple[str, str, str | None], tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    for record in _oldest_first(records):
        eager = next(result for result in record["results"] if result["mode"] == "eager")
        for result in record["results"]:
            latest[result["program"], result["mode"], result["executor"]] = _row(result, eager)
        sources[record["command"]] = _source(record)
    rows = [
        latest[key]
        for key in sorted(latest, key=lambda key: (key[0], key[1] != "eager", key[1], key[2] or ""))
    ]
    return "\n".join([markdown_table(HEAD, rows), "", *sources.values()])


def _oldest_first(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: str(record["environment"]["date"]))


def _row(result: dict[str, Any], eager: dict[str, Any]) -> tuple[str, ...]:
    name = f"{result['mode']} ({result['executor']})" if result["executor"] else result["mode"]
    if result["error"]:
        return (result["program"], name, f"failed: {result['error'].splitlines()[0]}", "", "", "", "", "no")
    spread, unit = _spread(result), _spread(eager)
    fallbacks = result["fallbacks"]
    return (
        result["program"],
        name,
        str(spread),
        f"{spread.median / unit.median:.2f}",
        f"{result['first_call_s']:.1f}",
        f"{result['peak_rss_mb'] * 1e6 / 2**30:.2f}",
        "" if fallbacks is None else f"{1000 * fallbacks / len(result['step_ms']):.0f}",
        _equality(result),
    )


def _spread(result: dict[str, Any]) -> Any:
    samples = result["step_ms"]
    return spread_of(samples[result["warmup_steps"] :] or samples)


def _equality(result: dict[str, Any]) -> str:
    if not result["equal"]:
        return "no"
    return "bit for bit" if result["tolerance"] is None else f"within {result['tolerance']:g}"


def _source(record: dict[str, Any]) -> str:
    machine = record["environment"]
    return (
        f"- `{record['command']}`: {machine['cpu']}, {machine['threads']} of {machine['cores']} cores,"
        f" torch {machine['torch']}, Python {machine['python']}, {machine['date'][:10]}"
    )
