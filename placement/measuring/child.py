"""Trials in a process of their own, so that a backend's crash or hang ends that process and not this one.

The child is started once for each backend and serves one trial after the other. It is told the
backend by pickle, so its class must be importable; a segment travels as an exported program.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from placement.backends.base import Backend
from placement.backends.exported import exported
from placement.measuring.protocol import Measurement
from placement.segments import Segment

STARTUP_S = 120.0
"""How long a child may take to import PyTorch and the backend."""


class ChildProcess:
    """Serves trials of one backend; `close` it."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self.backend = backend
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def attempt(self, segment: Segment, inputs: Sequence[torch.Tensor]) -> Measurement | None:
        """What is wrong with a segment on the backend; None if it can be tried here."""
        try:
            request = _pack(segment, inputs)
        except Exception as error:
            return Measurement("unsupported", detail=f"it cannot be sent to a child process: {error}")
        refusal = self._start()
        if refusal is not None:
            return refusal
        answer = self._ask((request,), self.timeout_s)
        return None if answer == "ok" else answer

    def _start(self) -> Measurement | None:
        if self._process is not None:
            return None
        try:
            hello = pickle.dumps((self.backend, torch.get_num_threads()))
        except Exception as error:
            return Measurement(
                "crashed", detail=f"{self.backend.name} cannot be sent to a child process: {error}"
            )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "placement.measuring.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
        )
        answer = self._ask((pickle.dumps(sys.path), hello), STARTUP_S)
        return None if answer == "ok" else answer

    def _ask(self, messages: tuple[bytes, ...], timeout_s: float) -> Measurement | Any:
        """The child's answer, or a Measurement that says how it ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        hung = threading.Event()

        def kill() -> None:
            hung.set()
            process.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.start()
        try:
            for message in messages:
                send(process.stdin, message)
            return pickle.loads(receive(process.stdout))
        except (EOFError, OSError):
            status = process.wait()
            last = self._last_words()
            self.close()
            if hung.is_set():
                return Measurement("hung", detail=f"no answer within {timeout_s:g} s")
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            return Measurement("crashed", detail=f"its process ended with {how}{last}")
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what it had not read yet
                        pipe.close()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def send(pipe: IO[bytes], message: bytes) -> None:
    """Writes a message with its length before it."""
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """Reads a message.

    Raises:
        EOFError: if the other side ended.
    """
    head = _exactly(pipe, 8)
    return _exactly(pipe, struct.unpack("<Q", head)[0])


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _pack(segment: Segment, inputs: Sequence[torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(exported(segment), buffer)
    tensors = io.BytesIO()
    torch.save(list(inputs), tensors)
    return pickle.dumps((buffer.getvalue(), tensors.getvalue()))
