"""The JSON that every command writes: one object with `command`, `environment` and `results`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shlex
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch


@dataclass(frozen=True, slots=True)
class Result:
    """What one program did in one mode. None stands for what does not apply or was not looked at."""

    program: str
    mode: str
    executor: str | None = None
    step_ms: tuple[float, ...] = ()
    """Every step's time in milliseconds, in order, warm-up included."""
    first_call_s: float | None = None
    """Seconds of the first step, compilation included."""
    equal: bool | None = None
    """Whether everything equalled eager: bit for bit, or within `tolerance` where there is one."""
    max_abs_diff: float | None = None
    traces: int | None = None
    fallbacks: int | None = None
    coexec_share: float | None = None
    """Share of the steps that ran in the co-execution phase, 0 to 1."""
    peak_rss_mb: float | None = None
    """The largest resident memory after a step of this mode, in MB; all modes live in one process."""
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Further fields of the JSON object."""


def result_from_json(fields: dict[str, Any]) -> Result:
    """Return the result that an object of a record was written from."""
    names = {field.name for field in dataclasses.fields(Result)} - {"details"}
    known = {name: value for name, value in fields.items() if name in names}
    return Result(**known, details={name: value for name, value in fields.items() if name not in names})


def write_record(path: Path, command: list[str], results: list[Result]) -> None:
    """Write one record, and make the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record(command, results), indent=1, allow_nan=False) + "\n")


def record(command: list[str], results: list[Result]) -> dict[str, Any]:
    """Return the object that is written; numbers that are not finite become null, which JSON can hold."""
    objects = []
    for result in results:
        fields = dataclasses.asdict(result)
        objects.append(_finite(fields | fields.pop("details")))
    return {
        "command": shlex.join(["python", "-m", "bench", *command]),
        "environment": environment(),
        "results": objects,
    }


def environment() -> dict[str, Any]:
    """Describe the machine, the versions and the moment."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "coexec": _version("coexec"),
        "platform": platform.platform(),
        "device": "cpu",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def resident_mb() -> float:
    """Return the memory that this process holds now, in MB."""
    resident_bytes: int = psutil.Process().memory_info().rss
    return resident_bytes / 1e6


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit that is checked out, with `-dirty` when tracked files differ from it."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(describe, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
