"""Results that are still being written when the block has been left.

In:  an iteration that is valid and committed, but not finished; the tensors that it concerns.
Out: the first use of one of them, anywhere, waits for the iteration.

Until then each of these tensors is of a subclass whose `__torch_function__` waits, gives all of them
their own classes back, and calls the function again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coexec.tracegraph.calls import tensors_in

_owners: dict[int, Pending] = {}  # by id of the tensor
_all: set[Pending] = set()
_lock = threading.RLock()


class Pending:
    """One unfinished iteration. `finish` is called once, by whoever needs a result first."""

    def __init__(self, wait: Callable[[], None], finish: Callable[[], None]) -> None:
        self._wait = wait
        self._finish = finish
        self._guarded: list[torch.Tensor] = []
        self._settled = False

    def guard(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes the use of these tensors wait."""
        with _lock:
            _all.add(self)
            for tensor in tensors:
                if id(tensor) not in _owners:
                    tensor.__class__ = _GUARDS[tensor.__class__]
                    _owners[id(tensor)] = self
                    self._guarded.append(tensor)

    def settle(self) -> None:
        """Waits, takes the guards off, and finishes the iteration."""
        with _lock:
            if self._settled:
                return
            self._settled = True
            self._wait()
            for tensor in self._guarded:
                tensor.__class__ = _PLAIN[tensor.__class__]
                del _owners[id(tensor)]
            self._guarded.clear()
            _all.discard(self)
            self._finish()


def guardable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class can be exchanged for one that waits."""
    return tensor.__class__ in _GUARDS


def settle_all() -> None:
    """Finishes every unfinished iteration."""
    for pending in list(_all):
        pending.settle()


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
_PLAIN = {guard: plain for plain, guard in _GUARDS.items()}
