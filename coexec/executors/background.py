"""Blocks compiled by another process, while the program goes on.

A thread of this process would fight with Python for the interpreter, and compilers set the random state that
the program draws from.

In:  blocks that are not on disk.
Out: whether they are by now, or why they cannot be compiled. The process is `python -m
     coexec.executors.background`, and reads the jobs from a file.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from coexec._private_inductor import compiler_options, set_compiler_options
from coexec.executors.job import Job, Unsupported, compiled

#: What the process exits with if a block cannot be compiled; the reason is all that it prints.
UNSUPPORTED = 3


class Compilation:
    """A process that compiles."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.blocks = len(jobs)
        self.began = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="coexec-")
        file = Path(self._folder.name) / "jobs"
        options = compiler_options()
        file.write_bytes(pickle.dumps((torch.get_num_threads(), options, list(jobs))))
        command = [sys.executable, "-m", "coexec.executors.background", str(file)]
        self._said = Path(self._folder.name) / "said"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,  # Ctrl-C is for the program
            )
        weakref.finalize(self, _stop, self._process, self._folder)

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Waits for its end."""
        self._process.wait()

    def failure(self) -> str | None:
        """Why there are blocks that were not compiled, once it has ended; None if there are none."""
        code = self._process.returncode
        if code == 0:
            return None
        said = self._said.read_text(errors="replace").strip().splitlines() or [""]
        if code == UNSUPPORTED:
            return said[-1]
        return f"the compiling process ended with {code}: {said[-1]}"

    def stop(self) -> None:
        """Ends it; what it has not compiled stays uncompiled."""
        _stop(self._process, self._folder)


def _stop(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
        process.wait()
    folder.cleanup()


def main(path: str) -> int:
    """Compiles the jobs in a file."""
    threads, options, jobs = pickle.loads(Path(path).read_bytes())
    torch.set_num_threads(threads)
    set_compiler_options(options)
    try:
        for job in jobs:
            compiled(job)
    except Unsupported as error:
        print(error)
        return UNSUPPORTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
