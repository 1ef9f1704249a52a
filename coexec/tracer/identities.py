"""Numbers for tensor objects that hold across iterations without keeping the tensors alive."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable

import torch


class Identities:
    """Gives each tensor object a number of its own for as long as it lives."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._by_uid: dict[int, weakref.ref[torch.Tensor]] = {}
        self._next = itertools.count()

    def uid(self, tensor: torch.Tensor) -> int:
        """The number of an object, a new one at first sight."""
        key = id(tensor)
        entry = self._entries.get(key)
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        uid = next(self._next)
        # Not this object itself: tensors would have weak references until the collector runs.
        reference = weakref.ref(tensor, functools.partial(_forget, weakref.ref(self), key, uid))
        self._entries[key] = (reference, uid)
        self._by_uid[uid] = reference
        return uid

    def references(self, uids: Iterable[int]) -> tuple[Callable[[], torch.Tensor | None], ...]:
        """For each number a function that returns its object, None when that is gone."""
        return tuple(self._by_uid.get(uid, _gone) for uid in uids)


def _forget(
    identities: weakref.ref[Identities], key: int, uid: int, reference: weakref.ref[torch.Tensor]
) -> None:
    owner = identities()
    if owner is None:
        return
    current = owner._entries.get(key)
    if current is not None and current[1] == uid:
        del owner._entries[key]
    owner._by_uid.pop(uid, None)


def _gone() -> None:
    return None
