"""Notices what Python does in a block without going through torch functions.

In:  a callback for each thread that is in a block.
Out: a context in which calls of these kinds on that thread call it first:

- functions of `torch.random` (`manual_seed`, `get_rng_state`, `fork_rng`): the GraphRunner draws random
  numbers while Python runs ahead, so the state that Python would see is not eager's;
- `torch.autograd.Function.apply`, `nn.Parameter(...)` and `Tensor._make_subclass`: their C++ code would
  keep hold of a placeholder;
- the beginning of a `torch.func` transform, whose C++ code wraps tensors.

The call itself runs in the context that the callback returns. Calls of the functional forms of optimizers
are handed to a second callback, which makes them. The stand-ins are in place only while some thread is in a
block, and pass on what other threads call.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from coexec._private import TRANSFORM_ENTRIES
from coexec.tracegraph.optimizers import ORIGINALS, Functional


class Watched(enum.Enum):
    """What a watched call does."""

    RANDOM = "random"  #: sees or sets random state
    KEEPS = "keeps"  #: keeps hold of its arguments in C++
    TRANSFORMS = "transforms"  #: wraps tensors that it is given later


Callback = Callable[[Watched, str, tuple[Any, ...]], contextlib.AbstractContextManager[None]]

#: Makes a call of an optimizer's functional form: the form, its arguments.
Optimizing = Callable[[Functional, tuple[Any, ...], dict[str, Any]], None]

_lock = threading.Lock()
_watches: dict[int, BlockWatch] = {}  # by thread
_saved: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there
_ABSENT = object()
_RANDOM: Any = torch.random  # its functions find the generator in this module
_FUNCTION: Any = torch.autograd.Function
_PARAMETER: Any = torch.nn.Parameter
_TENSOR: Any = torch.Tensor


class BlockWatch:
    """A context that reports to `called(kind, name, arguments)` what the current thread calls.

    `optimizing(form, arguments, keyword arguments)` makes the updates of optimizers, if it is given.
    """

    def __init__(self, called: Callback, optimizing: Optimizing | None = None) -> None:
        self.called = called
        self.optimizing = optimizing

    def __enter__(self) -> BlockWatch:
        with _lock:
            if not _watches:
                _install()
            _watches[threading.get_ident()] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _watches.pop(threading.get_ident(), None)
            if not _watches:
                _uninstall()


def _report(
    kind: Watched, name: str, arguments: tuple[Any, ...] = ()
) -> contextlib.AbstractContextManager[None]:
    watch = _watches.get(threading.get_ident())
    return contextlib.nullcontext() if watch is None else watch.called(kind, name, arguments)


class _Generator:
    def __getattr__(self, name: str) -> Any:
        with _report(Watched.RANDOM, f"the default generator's {name}"):
            return getattr(torch.default_generator, name)


def _watched_apply(apply: Any) -> Any:
    def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with _report(Watched.KEEPS, f"{cls.__name__}.apply", args):
            return apply.__func__(cls, *args, **kwargs)

    return classmethod(watched)


def _watched_new(new: Any) -> Any:
    def watched(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        with _report(Watched.KEEPS, "nn.Parameter", (data,)):
            return new(cls, data, requires_grad)

    return staticmethod(watched)


def _watched_make_subclass(make: Any) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _report(Watched.KEEPS, "Tensor._make_subclass", args):
            return make(*args, **kwargs)

    return staticmethod(watched)


def _watched_entry(begin: Any) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _report(Watched.TRANSFORMS, "a torch.func transform"):
            return begin(*args, **kwargs)

    return watched


def _watched_update(functional: Functional, original: Any) -> Any:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        watch = _watches.get(threading.get_ident())
        if watch is None or watch.optimizing is None:
            return original(*args, **kwargs)
        return watch.optimizing(functional, args, kwargs)

    return watched


def _install() -> None:
    _replace(_RANDOM, "default_generator", _Generator())
    _replace(_FUNCTION, "apply", _watched_apply(_FUNCTION.__dict__["apply"]))
    _replace(_PARAMETER, "__new__", _watched_new(_PARAMETER.__new__))
    _replace(_TENSOR, "_make_subclass", _watched_make_subclass(_TENSOR._make_subclass))
    for module, name in TRANSFORM_ENTRIES:
        _replace(module, name, _watched_entry(getattr(module, name)))
    for functional, original in ORIGINALS.items():
        module = importlib.import_module(functional.module)
        if getattr(module, functional.name) is original:  # what the user has put there is the user's
            _replace(module, functional.name, _watched_update(functional, original))


def _replace(owner: Any, name: str, stand_in: Any) -> None:
    _saved.append((owner, name, owner.__dict__.get(name, _ABSENT), stand_in))
    setattr(owner, name, stand_in)


def _uninstall() -> None:
    while _saved:
        owner, name, original, stand_in = _saved.pop()
        if owner.__dict__.get(name) is not stand_in:
            continue  # the user has put something else there
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
