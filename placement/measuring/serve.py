"""The child process of `child`: answers each request on standard input with a Measurement or "ok"."""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

import torch

from placement.capture import capture
from placement.measuring.child import receive, send
from placement.measuring.trial import attempt
from placement.segments import whole


def main() -> int:
    """Serves until standard input ends."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a backend prints must not get among the answers
    backend, threads = _hello(receive(requests), receive(requests))
    torch.set_num_threads(threads)
    send(answers, pickle.dumps("ok"))
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return 0
        send(answers, pickle.dumps(_serve(backend, request)))


def _hello(paths: bytes, message: bytes) -> Any:
    sys.path[:] = pickle.loads(paths)  # the backend's module is found where the parent found it
    return pickle.loads(message)


def _serve(backend: Any, request: bytes) -> Any:
    program, tensors = pickle.loads(request)
    inputs = torch.load(io.BytesIO(tensors))
    captured = capture(torch.export.load(io.BytesIO(program)), tuple(inputs))
    segment = whole(captured.graph)
    with torch.no_grad():
        trial = attempt(backend, segment, inputs, segment.module(*inputs))
    return "ok" if trial.failure is None else trial.failure


if __name__ == "__main__":
    raise SystemExit(main())
