"""A result as a trace that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.actions import Compute
from pipeline.simulator.result import Result

COMPUTE, LINKS = 0, 1
"""Process ids: one for what ranks compute, one for what links carry."""


def write_trace(result: Result, path: str | Path) -> None:
    """Write the trace to a JSON file."""
    content = {"traceEvents": list(trace_events(result)), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def trace_events(result: Result) -> Iterator[dict[str, Any]]:
    """Events in the trace format; times are microseconds, the bytes of each rank a counter."""
    for process, name in ((COMPUTE, "compute"), (LINKS, "links")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for r in range(len(result.program.ranks)):
        yield {"ph": "M", "pid": COMPUTE, "tid": r, "name": "thread_name", "args": {"name": f"rank {r}"}}
    tracks: dict[tuple[int, int], int] = {}
    for event in result.events:
        if event.peer < 0:
            process, track = COMPUTE, event.rank
        else:
            process = LINKS
            if (event.rank, event.peer) not in tracks:
                tracks[event.rank, event.peer] = len(tracks)
                name = f"rank {event.rank} to {event.peer}"
                track = tracks[event.rank, event.peer]
                yield {"ph": "M", "pid": LINKS, "tid": track, "name": "thread_name", "args": {"name": name}}
            track = tracks[event.rank, event.peer]
        yield {
            "ph": "X",
            "pid": process,
            "tid": track,
            "name": str(event.action),
            "cat": event.action.kind.value if isinstance(event.action, Compute) else "transfer",
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
        }
    for r, trace in enumerate(result.memory):
        for time, held in trace:
            yield {
                "ph": "C",
                "pid": COMPUTE,
                "name": f"rank {r} bytes",
                "ts": time * 1e6,
                "args": {"bytes": held},
            }
