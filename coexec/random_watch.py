"""Notices Python code that reads or sets the default generator's state in the middle of a block.

In:  a callback.
Out: a context in which `torch.manual_seed`, `torch.get_rng_state`, `torch.random.fork_rng` and the
     like call it first.

The GraphRunner draws random numbers while Python runs ahead, so the state that Python would see
there is not eager's. Operations that draw are not concerned: they go through torch functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

_RANDOM: Any = torch.random  # its functions find the generator in this module


class RandomWatch:
    """A context that watches the functions of `torch.random` on the current thread."""

    def __init__(self, touched: Callable[[str], None]) -> None:
        self._proxy = _Proxy(touched)

    def __enter__(self) -> RandomWatch:
        self._saved = _RANDOM.default_generator
        _RANDOM.default_generator = self._proxy
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _RANDOM.default_generator = self._saved


class _Proxy:
    def __init__(self, touched: Callable[[str], None]) -> None:
        self._touched = touched
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            self._touched(name)
        return getattr(torch.default_generator, name)
