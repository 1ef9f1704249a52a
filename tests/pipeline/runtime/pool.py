"""Processes that are started once and run many cases, since starting them takes seconds.

`Pool(4).run("numerics", "1f1b")` runs the function `numerics` of `cases.py` with that argument on each of 4
ranks, and gives what they return. A case that fails ends the pool's processes; the next one starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
"""No case may take longer; a hang ends here."""


class RankFailure(Exception):
    """What a rank raised, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {r}: {text}" for r, text in sorted(errors.items())))
        self.errors = errors


class Pool:
    """Processes of one gloo world."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        if self.processes:
            return
        context = multiprocessing.get_context("spawn")
        store = tempfile.mkdtemp()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.size, store, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def run(self, case: str, *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """What the case returns on each rank.

        Raises:
            RankFailure: Some rank raised, died or took too long.
        """
        self.start()
        for pipe in self.pipes:
            pipe.send((case, arguments))
        results: list[Any] = [None] * self.size
        errors: dict[int, str] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(limit_s):
                    errors[rank] = f"nothing within {limit_s} s"
                    continue
                good, value = pipe.recv()
            except (EOFError, ConnectionError):
                self.processes[rank].join(5)
                errors[rank] = f"died, exit code {self.processes[rank].exitcode}"
                continue
            if good:
                results[rank] = value
            else:
                errors[rank] = value
        if errors:
            self.stop()
            raise RankFailure(errors)
        return results


def _work(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.pipeline.runtime import cases

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(store) / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(cases, case)(rank, *arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
