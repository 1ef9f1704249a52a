"""Compiled blocks on disk.

In:  what determines a block: its graph, its inputs, versions, threads, the processor.
Out: the path of its library, compiled at most once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def directory() -> Path:
    """Where libraries are kept: `COEXEC_CACHE_DIR`, or the user's cache directory."""
    named = os.environ.get("COEXEC_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coexec"


def cached(description: str, compile_to: Callable[[str], None]) -> str:
    """The library of a block, compiled by `compile_to(path)` if it is not there."""
    environment = (
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
    )
    name = hashlib.sha256(repr((environment, description)).encode()).hexdigest()[:32]
    path = directory() / f"{name}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            target = os.path.join(scratch, path.name)
            compile_to(target)
            os.replace(target, path)  # in one step, so that no process sees half a library
    return str(path)
