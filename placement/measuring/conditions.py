"""The conditions under which times are comparable: threads as asked for, memory without page faults."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""glibc's numbers for mallopt (malloc.h)."""
_KEPT_BYTES = 1 << 30


def keep_memory() -> bool:
    """Lets the C library keep freed memory instead of giving it back and faulting it in again.

    A convolution took 556 page faults a call without this, and none with it. It holds for the whole
    process; `release_memory` puts the defaults back.

    Returns:
        Whether the C library can do so (glibc).
    """
    return _mallopt(mmap_max=0, trim=_KEPT_BYTES, pad=64 << 20)


def release_memory() -> bool:
    """Glibc's defaults again."""
    return _mallopt(mmap_max=65536, trim=128 << 10, pad=128 << 10)


def _mallopt(*, mmap_max: int, trim: int, pad: int) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(
        libc.mallopt(_M_MMAP_MAX, mmap_max)
        and libc.mallopt(_M_TRIM_THRESHOLD, trim)
        and libc.mallopt(_M_TOP_PAD, pad)
    )


@contextmanager
def quiet(*, allocator: bool, restore: bool = True) -> Iterator[None]:
    """No gradients, threads watched, and the allocator set for measuring if asked for, then set back."""
    before = torch.get_num_threads()
    if allocator:
        keep_memory()
    try:
        with torch.no_grad():
            yield
    finally:
        if allocator and restore:
            release_memory()
        if torch.get_num_threads() != before:
            log.warning(
                "a backend changed PyTorch's threads from %d to %d; they are set back",
                before,
                torch.get_num_threads(),
            )
            torch.set_num_threads(before)


@lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, and what PyTorch's kernels use of it."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} {torch.backends.cpu.get_cpu_capability()} {os.cpu_count()} cores"


def machine(device: str) -> str:
    """What runs segments of a device type, as the cost log's key has it."""
    if device == "cuda" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} CUDA {torch.version.cuda}"
    return processor()
