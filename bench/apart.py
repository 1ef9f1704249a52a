"""Work in a process of its own, so that a crash, a hang or memory of one piece is no other's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

Answer = TypeVar("Answer")

PRELOADED = ["torch", "coexec", "bench.commands.cases", "bench.programs"]


class ApartError(RuntimeError):
    """The process gave no answer; the message says why."""


def run_apart(work: Callable[[], Answer], timeout_s: float) -> Answer:
    """Run `work` in a fresh process, with as many kernel threads, and return what it returns.

    The process is forked from a server that has imported torch and never run it: threads do not survive a
    fork, and what they held would be held for ever.

    Args:
        work: can be pickled, and so can what it returns.
        timeout_s: seconds after which the process is ended.

    Raises:
        ApartError: if `work` raised, the process died, or its time was up.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, sending, torch.get_num_threads()))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout_s):
            raise ApartError(f"it gave no answer for {timeout_s:g} s and was ended")
        answer = receiving.recv()
    except EOFError:
        process.join()
        raise ApartError(f"its process died with exit status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, ApartError):
        raise answer
    result: Answer = answer
    return result


def _answer(work: Callable[[], Answer], sending: Connection, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        answer: Answer | ApartError = work()
    except BaseException as error:
        answer = ApartError(f"{type(error).__name__}: {error}")
    sending.send(answer)
