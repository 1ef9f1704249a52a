"""What an operation returns for tensors of a geometry, tried on tensors without memory.

In:  an operation and its arguments, each tensor as its geometry.
Out: the geometries of the tensors that it returns. Each question is answered once: the layers of a network
     ask the same ones, and so does every size where nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from coexec.tracegraph.calls import flat
from coexec.tracegraph.schema import by_schema

#: What arguments of these names are instead.
_INSTEAD = {"device": torch.device("meta"), "generator": None}


@dataclass(frozen=True, slots=True)
class Bare:
    """A tensor's geometry, and its type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Bare:
        """What a tensor is like."""
        return Bare(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other, in the order of their indices."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if stride != step:
                return False
            step *= size
        return True

    def empty(self) -> torch.Tensor:
        """A tensor like that, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class _Typed:
    """An argument with its type, without which True, 1 and 1.0 would be equal."""

    type: type
    value: Any


def elementwise(target: Any, arguments: Sequence[Any], dtype: torch.dtype) -> Bare | None:
    """What an elementwise operation on contiguous tensors of one shape returns; None if it is none.

    Args:
        target: the operation.
        arguments: of it.
        dtype: of its result, on which shapes have no influence.
    """
    if torch.Tag.pointwise not in target.tags:
        return None
    if any(isinstance(a, (torch.Tensor, list, tuple)) for a in arguments):
        return None
    bare = {a for a in arguments if isinstance(a, Bare)}
    if len({a.shape for a in bare}) != 1 or not all(a.is_contiguous for a in bare):
        return None
    one = next(iter(bare))
    return Bare(one.shape, one.stride, dtype)


def returned(target: Any, arguments: Sequence[Any]) -> tuple[Bare | None, ...]:
    """What an operation returns; it draws nothing.

    Raises:
        Exception: what the operation raises, or what is raised where it has no such kernel.
    """
    declared = target._schema.arguments
    typed = tuple(
        _typed(_INSTEAD.get(d.name, argument)) for d, argument in zip(declared, arguments, strict=True)
    )
    try:
        hash(typed)
    except TypeError:
        return _tried(target, typed)
    return _remembered(target, typed)


def _typed(argument: Any) -> Any:
    if isinstance(argument, Bare):
        return argument
    if isinstance(argument, torch.Tensor):
        return Bare.of(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_typed, argument))
    return _Typed(type(argument), argument)


def _value(typed: Any) -> Any:
    if isinstance(typed, Bare):
        return typed.empty()
    if isinstance(typed, tuple):
        return list(map(_value, typed))
    return typed.value


def _tried(target: Any, typed: tuple[Any, ...]) -> tuple[Bare | None, ...]:
    positional, keywords = by_schema(target, map(_value, typed))
    made = target(*positional, **keywords)
    if not target._schema.returns:
        return ()
    return tuple(None if t is None else Bare.of(t) for t in flat(made))


_remembered = lru_cache(maxsize=1 << 14)(_tried)
