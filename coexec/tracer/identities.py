"""Numbers for tensor objects that hold across iterations without keeping the tensors alive."""

from __future__ import annotations

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

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            current = self._entries.get(key)
            if current is not None and current[1] == uid:
                del self._entries[key]
            self._by_uid.pop(uid, None)

        reference = weakref.ref(tensor, forget)
        self._entries[key] = (reference, uid)
        self._by_uid[uid] = reference
        return uid

    def references(self, uids: Iterable[int]) -> tuple[Callable[[], torch.Tensor | None], ...]:
        """For each number a function that returns its object, None when that is gone."""
        return tuple(self._by_uid.get(uid, _gone) for uid in uids)


def _gone() -> None:
    return None
