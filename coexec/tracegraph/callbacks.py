"""Events by which code of the user takes part in autograd.

The forward of a custom `torch.autograd.Function` is code of the user, and so is its backward. The torch calls
in both are events like any others. Between them stand events that no Python function makes, only named here:

- `Applied(function)`: from here on, the outputs of the function's forward have its autograd node;
- `hooked`: from here on, the tensor has a hook;
- `entered`, `left`: between the two, autograd saves nothing, because a checkpoint computes it again;
- the backward pass, which returns a `CalledBack` where it has to call the user: what is behind that, `go_on`
  with what the user returned, is an event of its own, and may return another `CalledBack`.

`coexec.callbacks` makes these calls.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from coexec.tracegraph.calls import Container


class CalledBack(tuple[Any, ...]):
    """What a backward pass returns that has to call the user: the name of the callback, and its gradients."""

    __slots__ = ()


class Stopped(tuple[Any, ...]):
    """What a call returns that is stopped because autograd has all it needs: it raises `StopRecomputing`."""

    __slots__ = ()


def is_stopped(result: Any) -> bool:
    """Whether this is the result of a call that is stopped, as an event has it."""
    return isinstance(result, Container) and result.kind is Stopped


#: What the results of calls are made of that end otherwise than by returning to their callers.
UNRETURNED = (CalledBack, Stopped)


def leaf_called_back(node: Any) -> int | None:
    """What names the leaf whose hook a part of a backward pass ends with, if it does."""
    result = node.result
    if not isinstance(result, Container) or result.kind is not CalledBack:
        return None
    name: str = result.items[0]
    return None if name.isdigit() else int(name.split()[0])


class Applied:
    """The event behind the forward of a custom function."""

    def __init__(self, name: str, module: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = module

    def __call__(self, *arguments: Any) -> NoReturn:
        """Is not made by itself."""
        raise RuntimeError(f"{self.__name__} is an event, and no function to be called")


_applied: weakref.WeakKeyDictionary[Any, Applied] = weakref.WeakKeyDictionary()


def applied(function: type[torch.autograd.Function]) -> Applied:
    """The event of a custom function: the same one for the same function."""
    event = _applied.get(function)
    if event is None:
        event = _applied[function] = Applied(function.__name__, function.__module__)
    return event


def is_callback(function: Any) -> bool:
    """Whether the event of this function has autograd call code of the user."""
    return function.__class__ is Applied or function in (hooked, entered)


def go_on(gradients: Any) -> NoReturn:
    """The event by which a backward pass goes on with what a callback returned."""
    raise RuntimeError("go_on is an event, and no function to be called")


def hooked(tensor: torch.Tensor) -> NoReturn:
    """The event that registers a hook on a tensor."""
    raise RuntimeError("hooked is an event, and no function to be called")


def entered(pattern: str) -> NoReturn:
    """The event that begins the region of a checkpoint, in which autograd saves nothing."""
    raise RuntimeError("entered is an event, and no function to be called")


def left() -> NoReturn:
    """The event that ends the region of a checkpoint."""
    raise RuntimeError("left is an event, and no function to be called")


hooked.__module__ = "Tensor"
entered.__module__ = left.__module__ = "torch.utils.checkpoint"
go_on.__module__ = "torch.autograd"  # where a reader of a TraceGraph expects it
