"""Start the processes of a run on this machine, and see to it that none is left.

In:  a module to run on each rank, and a directory for what the ranks have to say.
Out: the exit status of torchrun; afterwards all its processes are gone.

Each rank writes `rank-R.pid` when it starts, and ends by itself when torchrun, or what started that, is gone,
so that even killing these leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread

POLL_S = 0.2
"""How often to look whether processes are still there, seconds."""

GRACE_S = 10.0
"""How long processes have to end by themselves, seconds."""


_LAUNCHER = "PIPELINE_LAUNCHER"
"""Variable with the id of the process that started torchrun."""


def launch(
    module: str,
    arguments: Sequence[str],
    processes: int,
    directory: Path,
    *,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[], None] | None = None,
) -> int:
    """Run a module on as many processes with torchrun.

    Args:
        module: Its name.
        arguments: Its arguments.
        processes: How many.
        directory: Where ranks write their process ids.
        limit_s: After how many seconds everything is ended; never when left out.
        environment: Variables of the processes besides those of this one.
        watch: Called again and again meanwhile.

    Returns:
        0 when all ranks ended well.
    """
    torchrun = [sys.executable, "-m", "pipeline.runtime.torchrun", "--standalone", "--nproc-per-node"]
    command = [*torchrun, str(processes), "-m", module, *arguments]
    # Each rank computes with one thread unless told otherwise; said here, torchrun need not warn about it.
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {}), _LAUNCHER: str(os.getpid())}
    process = subprocess.Popen(command, env=variables)
    end = None if limit_s is None else time.monotonic() + limit_s
    try:
        while process.poll() is None:
            if end is not None and time.monotonic() > end:
                break
            if watch is not None:
                watch()
            time.sleep(POLL_S)
    finally:
        _end(process, directory)
    return process.returncode


def announce(directory: Path, rank: int) -> None:
    """To be called by each rank first: writes its process id, and ends it when those above it are gone."""
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    parent, launcher = os.getppid(), int(os.environ.get(_LAUNCHER, os.getppid()))

    def stay() -> None:
        while os.getppid() == parent and _alive(launcher):
            time.sleep(POLL_S)
        os._exit(1)

    Thread(target=stay, name="pipeline-parent", daemon=True).start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Ask torchrun to end, then make sure that it and all ranks have."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        process.kill()
    process.wait()
    for path in directory.glob("rank-*.pid"):
        pid = int(path.read_text())
        if _is_rank(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_rank(pid: int) -> bool:
    """Whether the process is still one of ours: the number may have been given to another."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"pipeline" in command
