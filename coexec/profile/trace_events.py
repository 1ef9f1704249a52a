"""A timeline as Chrome trace events, which chrome://tracing and ui.perfetto.dev show.

Source: "Trace Event Format" (Google, 2016): complete events (`ph` "X") with times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coexec.profile.timeline import Span, Timeline

_PROCESS = 1


def write_trace(timeline: Timeline, path: Path) -> None:
    """Writes a JSON object with `traceEvents`."""
    path.write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}) + "\n")


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """One thread for each lane; the iterations enclose what Python does in them."""
    events = [_named("process_name", 0, "coexec"), _named("thread_name", 1, "PythonRunner")]
    for iteration in timeline.iterations:
        args = {"program": iteration.key}
        events.append(_complete(iteration.title, "iteration", iteration.begin_s, iteration.left_s, 1, args))
    events += [_event("PythonRunner", span, 1) for span in timeline.python]
    for thread, (key, spans) in enumerate(timeline.graph.items(), start=2):
        events.append(_named("thread_name", thread, f"GraphRunner of {key}"))
        events += [_event("GraphRunner", span, thread) for span in spans]
    return events


def _event(runner: str, span: Span, thread: int) -> dict[str, Any]:
    kind = f"{runner} {'stall' if span.stalled else 'exec'}"
    return _complete(kind, kind, span.begin_s, span.end_s, thread, {"what": span.name})


def _complete(
    name: str, category: str, begin_s: float, end_s: float, thread: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": _PROCESS, "tid": thread, "args": args} | times


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}
