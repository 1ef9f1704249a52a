"""Results that are still being written when the block has been left.

In:  an iteration that is valid and committed, but not finished; the tensors that it concerns.
Out: the first use of one of them, anywhere, waits for the iteration.

Until then each of these tensors is of a subclass whose `__torch_function__` waits, gives all of them
their own classes back, and calls the function again; and it is marked, so that operations which pass no torch
function are seen. The next iteration of the same program may begin
before: in its block the PythonRunner sees every call, so the tensors have their own classes there, and it
asks `is_pending`.
"""

from __future__ import annotations

import atexit
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coexec import interrupts
from coexec._native import core
from coexec._private import forget_hulls, in_no_context, keep_hulls, successor
from coexec.runners.graph_runner import GraphRunner
from coexec.tracegraph.calls import tensors_in

_owners: dict[int, Pending] = {}  # by id of the tensor
_all: set[Pending] = set()
_lock = threading.RLock()


class Pending:
    """One unfinished iteration, of the native GraphRunner.

    `finish` is called once, by whoever needs a result first.

    Attributes:
        graph_runner: what executes it.
        thread: which thread ran it.
        settled: whether it is finished.
        committed: whether what the graph computed is what has been taken, when it is finished.
        abandon: gives up what has begun on the assumption that it will be.
    """

    def __init__(self, graph_runner: GraphRunner, finish: Callable[[], bool]) -> None:
        self.thread = threading.get_ident()
        self.settled = False
        self.committed = False
        self.abandon: Callable[[], None] = _nothing
        self.graph_runner = graph_runner
        self._finish = finish
        self._guards: Any = core.Guards(_owners, _GUARDS)

    def guard(self, tensors: Sequence[torch.Tensor], unreachable: Sequence[torch.Tensor] = ()) -> None:
        """Makes the use of these tensors wait; nobody gets at the `unreachable` ones without using others."""
        with _lock:
            _all.add(self)
            self._guards.guard(tensors, self)
            self._guards.own(unreachable, self)

    def lift(self) -> None:
        """Gives the tensors their own classes back: somebody else sees to it that their use waits."""
        with _lock:
            self._guards.lift()

    def settle(self) -> None:
        """Waits, takes the guards off, and finishes the iteration."""
        with _lock:
            if self.settled:
                return
            handlers = interrupts.put_off()
            try:
                self._settle()
            finally:
                interrupts.as_before(handlers)

    def _settle(self) -> None:
        self.settled = True
        with in_no_context():  # that of whoever needs a result has nothing to do with it
            self.graph_runner.join()
            self.lift()
            self._guards.disown()
            _all.discard(self)
            self.committed = self._finish()


def _nothing() -> None:
    return None


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to an unfinished iteration."""
    return id(tensor) in _owners


def guardable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class can be exchanged for one that waits."""
    return tensor.__class__ in _GUARDS


def settle_all(but: Pending | None = None) -> None:
    """Finishes every unfinished iteration, `but` one."""
    for pending in list(_all):
        if pending is not but:
            pending.settle()


def current(tensor: torch.Tensor) -> torch.Tensor:
    """What C++ code should have in the place of a tensor: what that has become, with everything written."""
    tensor = successor(tensor)
    owner = _owners.get(id(tensor))
    if owner is not None:
        forget_hulls()
        with keep_hulls():
            owner.settle()
    elif core.is_marked(tensor):  # a copy that C++ code has made of the object, with its memory
        settle_all()
    return tensor


def after_fork() -> None:
    """In a child process, where no other thread is left that could hold the lock."""
    global _lock
    _lock = threading.RLock()


if core is not None:
    core.set_current(current)


atexit.register(settle_all)  # what was begun is finished, as in eager


def _settle(value: Any) -> None:
    for tensor in tensors_in(value):
        owner = _owners.get(id(tensor))
        if owner is not None:
            owner.settle()


def _settle_and_call(
    cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Waits for everything among the arguments, and calls the function on what it has become."""
    _settle((args, kwargs))
    return function(*args, **(kwargs or {}))


class PendingTensor(torch.Tensor):
    """A `torch.Tensor` whose next use waits."""

    __torch_function__: Any = classmethod(_settle_and_call)


class PendingParameter(torch.nn.Parameter):
    """An `nn.Parameter` whose next use waits."""

    __torch_function__: Any = classmethod(_settle_and_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _settle(self)
        return self.__reduce_ex__(protocol)


_GUARDS: dict[type, type] = {torch.Tensor: PendingTensor, torch.nn.Parameter: PendingParameter}
