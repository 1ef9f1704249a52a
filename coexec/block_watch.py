"""Notices what Python does in a block without going through torch functions.

In:  a callback for each thread that is in a block.
Out: a context in which three kinds of calls on that thread call it first:

- functions of `torch.random` (`manual_seed`, `get_rng_state`, `fork_rng`): the GraphRunner draws random
  numbers while Python runs ahead, so the state that Python would see is not eager's;
- `torch.autograd.Function.apply` and `nn.Parameter(...)`: their C++ code would keep hold of a placeholder.

The stand-ins are in place only while some thread is in a block, and pass on what other threads call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

Callback = Callable[[str, tuple[Any, ...]], None]

_lock = threading.Lock()
_callbacks: dict[int, Callback] = {}  # by thread
_saved: list[Any] = []
_RANDOM: Any = torch.random  # its functions find the generator in this module
_FUNCTION: Any = torch.autograd.Function
_PARAMETER: Any = torch.nn.Parameter


class BlockWatch:
    """A context that reports to `called(name, arguments)` what the current thread calls."""

    def __init__(self, called: Callback) -> None:
        self._called = called

    def __enter__(self) -> BlockWatch:
        with _lock:
            if not _callbacks:
                _install()
            _callbacks[threading.get_ident()] = self._called
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _callbacks.pop(threading.get_ident(), None)
            if not _callbacks:
                _uninstall()


def _report(name: str, arguments: tuple[Any, ...]) -> None:
    callback = _callbacks.get(threading.get_ident())
    if callback is not None:
        callback(name, arguments)


class _Generator:
    def __getattr__(self, name: str) -> Any:
        _report(f"the default generator's {name}", ())
        return getattr(torch.default_generator, name)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    _report(f"{cls.__name__}.apply", args)
    return _saved[1].__func__(cls, *args, **kwargs)


def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    _report("nn.Parameter", (data,))
    return _saved[2](cls, data, requires_grad)


def _install() -> None:
    _saved[:] = [
        _RANDOM.default_generator,
        _FUNCTION.__dict__["apply"],
        _PARAMETER.__new__,
    ]
    _RANDOM.default_generator = _Generator()
    _FUNCTION.apply = classmethod(_apply)
    _PARAMETER.__new__ = staticmethod(_new_parameter)


def _uninstall() -> None:
    _RANDOM.default_generator, _FUNCTION.apply, new = _saved
    _PARAMETER.__new__ = staticmethod(new)
