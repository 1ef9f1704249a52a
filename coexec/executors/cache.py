"""Compiled blocks on disk.

In:  what determines a block: its graph, its inputs, threads, versions, the compiler's options, the processor.
Out: the path of its library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from coexec._private_inductor import compiler_settings

#: Changes when the same block is compiled in another way.
_FORMAT = 5


def directory() -> Path:
    """Where libraries are kept: `COEXEC_CACHE_DIR`, or the user's cache directory."""
    named = os.environ.get("COEXEC_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coexec"


def path_of(description: str) -> Path:
    """Where the library of a block belongs: on this machine, with these versions."""
    environment = (
        _FORMAT,
        compiler_settings(),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
    )
    name = hashlib.sha256(repr((environment, description)).encode()).hexdigest()[:32]
    return directory() / f"{name}.pt2"


def install(path: Path, compile_to: Callable[[str], None]) -> None:
    """Puts the file that `compile_to(path)` writes at a path, in one step, so that none sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        target = os.path.join(scratch, path.name)
        compile_to(target)
        os.replace(target, path)
