"""Processes that are started once and run many cases, since starting them takes seconds.

`Pool(4).run("numerics", "1f1b")` runs the function `numerics` of `cases.py` with that argument on each of 4
ranks, and gives what they return. Each case has a process group of its own, so that one that fails costs the
next one no more than the processes that died.
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
    """Processes that wait for work."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.members: list[tuple[Any, Connection] | None] = [None] * size
        self.directory = tempfile.TemporaryDirectory()
        self.cases = 0

    def start(self) -> None:
        """Start the processes that aren't there, and wait until they are."""
        context = multiprocessing.get_context("spawn")
        started = [r for r, member in enumerate(self.members) if member is None]
        for rank in started:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.size, self.backend, there), daemon=True)
            process.start()
            there.close()
            self.members[rank] = process, here
        for rank in started:
            _, pipe = self.members[rank]
            assert pipe.poll(LIMIT_S)
            pipe.recv()

    def stop(self) -> None:
        for rank in range(self.size):
            self._end(rank)
        self.directory.cleanup()

    def _end(self, rank: int) -> int | None:
        member, self.members[rank] = self.members[rank], None
        if member is None:
            return None
        process, pipe = member
        process.join(1)
        process.kill()
        process.join()
        pipe.close()
        return process.exitcode

    def run(self, case: str, *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """What the case returns on each rank.

        Raises:
            RankFailure: Some rank raised, died or took too long.
        """
        self.start()
        self.cases += 1
        store = str(Path(self.directory.name) / str(self.cases))
        for _, pipe in self.members:
            pipe.send((store, case, arguments))
        results: list[Any] = [None] * self.size
        errors: dict[int, str] = {}
        for rank, (_, pipe) in enumerate(self.members):
            try:
                if pipe.poll(limit_s):
                    good, value = pipe.recv()
                else:
                    good, value = False, f"nothing within {limit_s} s"
                    self._end(rank)
            except (EOFError, ConnectionError):
                good, value = False, f"died, exit code {self._end(rank)}"
            if good:
                results[rank] = value
            else:
                errors[rank] = value
        if errors:
            raise RankFailure(errors)
        return results


def _work(rank: int, size: int, backend: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.pipeline.runtime import cases

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    pipe.send("ready")
    while True:
        try:
            store, case, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=LIMIT_S / 2),
            )
            # Who fails at once must not break connections that others are still making.
            dist.barrier()
            pipe.send((True, getattr(cases, case)(rank, *arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
