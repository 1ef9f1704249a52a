"""Notices what Python does in a block without going through torch functions.

In:  a callback for each thread that is in a block.
Out: a context in which calls of these kinds on that thread call it first:

- functions of `torch.random` (`seed`, `initial_seed`; without the native module all of them): the GraphRunner
  draws random numbers while Python runs ahead, so the state that Python would see is not eager's;
- the `apply` of an autograd function, functions and methods of TorchScript, `to_dlpack`, `nn.Parameter(...)`,
  `Tensor._make_subclass` and `Tensor.as_subclass`: their C++ code would keep hold of a placeholder;
- operators for control flow, as `torch.cond`: Dynamo would look into coexec's modes;
- the beginning of a `torch.func` transform, whose C++ code wraps tensors.

The call itself runs in the context that the callback returns. Calls of the functional forms of optimizers
are handed to a second callback, which makes them, and so is what optimizers do to gradients; what dispatches
torch functions that are written in Python calls the block's mode without Python code. The stand-ins
are in place only while some thread is in a block, and pass on what other threads call. Those in classes of
tensors stay from the first block on: Python 3.13 never again caches the attributes of a class that has
changed a thousand times.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.overrides import handle_torch_function

from coexec._native import core
from coexec._private import (
    AUTOGRAD_APPLY,
    AUTOGRAD_FUNCTION,
    CHECKPOINTS,
    CHOOSING_KERNELS,
    CONTROL_FLOW,
    DISPATCHING,
    DYNAMO_INLINES,
    EXPORTS,
    FRAMES_SAVE_INPUTS,
    SCRIPTED,
    TRANSFORM_ENTRIES,
    arguments_of_forward,
    is_inmost,
    is_left_alone,
    run_apply,
    watch_apply,
    without_inmost_mode,
)
from coexec.callbacks.checkpoint import Region, frame_of
from coexec.callbacks.iteration import Callbacks
from coexec.tracegraph.optimizers import ORIGINALS, Functional
from coexec.tracegraph.random_state import EVENTS


class Watched(enum.Enum):
    """What a watched call does."""

    RANDOM = "random"  #: sees or sets random state
    KEEPS = "keeps"  #: keeps hold of its arguments in C++
    TRANSFORMS = "transforms"  #: wraps tensors that it is given later
    COMPILES = "compiles"  #: has Dynamo look at the program


Callback = Callable[[Watched, str, tuple[Any, ...]], contextlib.AbstractContextManager[None]]

#: Makes a call of an optimizer's functional form: the form, its arguments.
Optimizing = Callable[[Functional, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of an optimizer's method."""

    original: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> Any:
        """Makes it as it is."""
        return self.original(self.optimizer, *self.args, **self.kwargs)


#: Makes a call of an optimizer's method, in its own way.
Method = Callable[[MethodCall], Any]

ZERO_GRAD, INIT_GROUP = "zero_grad", "_init_group"

_lock = threading.Lock()
_watches: dict[int, BlockWatch] = {}  # by thread
_ABSENT = object()
_NO_METHODS: Mapping[str, Method] = {}


class BlockWatch:
    """A context that reports to `called(kind, name, arguments)` what the current thread calls.

    `optimizing(form, arguments, keyword arguments)` makes the updates of optimizers, `methods` by name
    what they do to gradients, and `callbacks` the calls of custom autograd functions and checkpoints, if
    these are given. With `orders_draws`, seeing and setting random state are torch calls.
    """

    def __init__(
        self,
        called: Callback,
        optimizing: Optimizing | None = None,
        methods: Mapping[str, Method] = _NO_METHODS,
        callbacks: Callbacks | None = None,
        *,
        orders_draws: bool = False,
    ) -> None:
        self.called = called
        self.optimizing = optimizing
        self.methods = methods
        self.callbacks = callbacks
        self.orders_draws = orders_draws

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


def _watch() -> BlockWatch | None:
    """The watch of the current thread."""
    return _watches.get(threading.get_ident())


def _callbacks() -> Callbacks | None:
    """What the current thread's code in backward passes is a part of."""
    watch = _watch()
    return None if watch is None else watch.callbacks


def _report(
    kind: Watched, name: str, arguments: tuple[Any, ...] = ()
) -> contextlib.AbstractContextManager[None]:
    watch = _watch()
    return contextlib.nullcontext() if watch is None else watch.called(kind, name, arguments)


class _Generator:
    def __getattr__(self, name: str) -> Any:
        watch = _watch()
        if watch is not None and watch.orders_draws and name in EVENTS and is_inmost():
            return functools.partial(_random_event, name)
        with _report(Watched.RANDOM, f"the default generator's {name}"):
            return getattr(torch.default_generator, name)


def _random_event(name: str, *args: Any) -> Any:
    """Calls a method of the default generator in the order of draws."""
    if name == "manual_seed":
        [seed] = args
        if seed.__class__ is not int or not -(2**63) <= seed < 2**64:
            return torch.default_generator.manual_seed(seed)  # the error that it is
        args = (torch.tensor(seed - 2**64 if seed >= 2**63 else seed),)
    event: Any = EVENTS[name]
    returned: Any = handle_torch_function(event, (), *args)
    return torch.default_generator if returned is None else returned


def _watched_apply(found: Any) -> Any:
    """What takes the place of an `apply`, where C++ code does not report the calls of its own."""
    apply = found if isinstance(found, classmethod) else AUTOGRAD_APPLY  # what it found is bound to its base

    def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if apply is AUTOGRAD_APPLY:
            return _applied(cls, *args, **kwargs)
        with _report(Watched.KEEPS, f"{cls.__name__}.apply", args):
            return apply.__get__(None, cls)(*args, **kwargs)

    return classmethod(watched)


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Does what the `apply` of an autograd function does."""
    callbacks = _callbacks()
    given = None if callbacks is None else arguments_of_forward(cls, args, kwargs)
    if callbacks is not None and given is not None:
        returned = callbacks.apply(cls, given)
        if returned is not NotImplemented:
            return returned
    with _report(Watched.KEEPS, f"{cls.__name__}.apply", args):
        return run_apply(cls, *args, **kwargs)


class _Engine:
    """Autograd's engine: what the user's code asks it for reaches it, wherever that code is run."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, function: Callable[[], None]) -> Any:
        callbacks = _callbacks()
        queued = callbacks is not None and callbacks.queue_callback(function)
        return None if queued else self._engine.queue_callback(function)


def _watched_frame(original: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        callbacks = _checkpointing()
        return original(*args, **kwargs) if callbacks is None else frame_of(callbacks, args, kwargs)

    return made


def _watched_region(original: Any) -> Any:
    def made(frame: Any) -> Any:
        callbacks = _checkpointing()
        return original(frame) if callbacks is None else Region(callbacks, frame)

    return made


def _checkpointing() -> Callbacks | None:
    """What checkpoints of this thread are events of."""
    return _callbacks() if is_inmost() else None


def _watched_script(call: Any) -> Any:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _report(Watched.KEEPS, f"the TorchScript function {self.name}", (args, kwargs)):
            return call(self, *args, **kwargs)

    return watched


def _watched_call(kind: Watched, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _report(kind, name, (args, kwargs)):
            return original(*args, **kwargs)

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    vars(watched)[DYNAMO_INLINES] = unwatched  # Dynamo knows the original
    return watched


def _told_without_own_modes(original: Any) -> Any:
    def told(arguments: Any) -> bool:
        # Attention has another kernel, with other results, where no mode and no subclass looks on.
        asks_for_kernel = sys._getframe(1).f_globals.get("__name__") in CHOOSING_KERNELS
        with without_inmost_mode() if asks_for_kernel and is_inmost() else contextlib.nullcontext():
            return bool(original(arguments))

    return told


def _watched_new(new: Any) -> Any:
    make = getattr(new, "__func__", new)

    def watched(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        with _report(Watched.KEEPS, "nn.Parameter", (data,)):
            return make(cls, data, requires_grad)

    return staticmethod(watched)


def _watched_update(functional: Functional, original: Any) -> Any:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        watch = _watch()
        if watch is None or watch.optimizing is None:
            return original(*args, **kwargs)
        return watch.optimizing(functional, args, kwargs)

    return watched


def _watched_method(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch()
        method = None if watch is None else watch.methods.get(name)
        call = MethodCall(original, self, args, kwargs)
        return call.make() if method is None else method(call)

    return watched


class _Place:
    """Where a stand-in goes; if `only` is given, in the place of that, also where Dynamo has wrapped it.

    Attributes:
        there: what `owner` has, by name.
        stays: whether the stand-in stays in place between blocks.
        before, stand_in: what was there last when a stand-in was made, and that one.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any], only: Any = None) -> None:
        self.owner, self.name, self.only = owner, name, only
        self.there: Mapping[str, Any] = owner.__dict__
        self.stays = isinstance(owner, type) and issubclass(owner, torch.Tensor)
        self.before: Any = object()
        self.stand_in: Any = object()
        self._make = make  # of what is there

    def occupy(self, found: Any) -> None:
        """Takes the place of what was found there, unless that is of the user's."""
        if self.only is not None and found is not self.only and not is_left_alone(found, self.only):
            return
        self.before = found
        self.stand_in = self._make(getattr(self.owner, self.name) if found is _ABSENT else found)
        setattr(self.owner, self.name, self.stand_in)

    def leave(self) -> None:
        """Puts back what was there."""
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def _places() -> list[_Place]:
    optim: Any = torch.optim
    keeps_class = functools.partial(_watched_call, Watched.KEEPS, "Tensor._make_subclass")

    def calls(owner: Any, name: str, kind: Watched, title: str) -> _Place:
        return _Place(owner, name, functools.partial(_watched_call, kind, title))

    found = [
        # The functions of torch.random find the generator in their module.
        _Place(torch.random, "default_generator", lambda _: _Generator()),
        _Place(torch.autograd.Variable, "_execution_engine", _Engine),
        *(_Place(kind, "__call__", _watched_script) for kind in SCRIPTED),
        *(calls(owner, name, Watched.KEEPS, "to_dlpack") for owner, name in EXPORTS),
        _Place(torch.nn.Parameter, "__new__", _watched_new),
        _Place(torch.Tensor, "_make_subclass", lambda make: staticmethod(keeps_class(make))),
        calls(torch.Tensor, "as_subclass", Watched.KEEPS, "Tensor.as_subclass"),
        *(calls(o, n, Watched.TRANSFORMS, "a torch.func transform") for o, n in TRANSFORM_ENTRIES),
        *(calls(owner, name, Watched.COMPILES, f"torch.{name}") for owner, name in CONTROL_FLOW),
    ]
    if watch_apply is None:
        found.append(_Place(AUTOGRAD_FUNCTION, "apply", _watched_apply))
    if FRAMES_SAVE_INPUTS:
        module, frame, region = CHECKPOINTS
        found += [_Place(module, frame, _watched_frame), _Place(module, region, _watched_region)]
    if core is not None:  # functions that Python dispatches reach their mode without Python code
        found += [
            _Place(module, handle_torch_function.__name__, core.handler, handle_torch_function)
            for module in DISPATCHING
        ]
    found.append(_Place(torch.overrides, "has_torch_function", _told_without_own_modes))
    for functional, original in ORIGINALS.items():
        module = importlib.import_module(functional.module)
        make = functools.partial(_watched_update, functional)
        found.append(_Place(module, functional.name, make, original))
    methods = [(optim.Optimizer, ZERO_GRAD)]
    methods += [(c, INIT_GROUP) for c in (optim.Adam, optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad)]
    for owner, name in methods:
        original = inspect.unwrap(getattr(owner, name)) if name == INIT_GROUP else owner.__dict__[name]
        found.append(_Place(owner, name, functools.partial(_watched_method, name), original))
    return found


_PLACES = _places()


def _install() -> None:
    if watch_apply is not None:  # programs may have got the `apply` of a function before the block
        watch_apply(_applied)
    for place in _PLACES:  # in each iteration
        found = place.there.get(place.name, _ABSENT)
        if found is place.before:
            setattr(place.owner, place.name, place.stand_in)
        elif found is not place.stand_in:
            place.occupy(found)


def forget() -> None:
    """Ends all watches, in a child process that has none of the blocks."""
    global _lock
    _lock = threading.Lock()
    _watches.clear()
    _uninstall()


def _uninstall() -> None:
    if watch_apply is not None:
        watch_apply(None)
    for place in _PLACES:
        # What the user has put there stays.
        if not place.stays and place.there.get(place.name) is place.stand_in:
            place.leave()
