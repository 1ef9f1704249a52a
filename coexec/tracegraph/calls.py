"""The structure of a call: tensors, numbers and everything else, taken apart and put together.

`flatten` splits the arguments of a torch call into tensors, numbers and a hashable key, the same
way in the tracing phase and in the co-execution phase. `template` and `build` do the same for what a
call returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from coexec.tracegraph.trace import Hooks, Number, TensorMeta

NAN = float("nan")  # one object, so that keys and templates that hold it are equal to themselves


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that cannot be compared by value: the very object, kept alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Exact:
    """A number that is equal to another only if they are written alike: -0j is not 0j."""

    value: complex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and repr(other.value) == repr(self.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def flatten(
    args: Sequence[Any], kwargs: dict[str, Any] | None
) -> tuple[list[torch.Tensor], list[Number], Hashable]:
    """Takes the arguments of a call apart.

    Returns:
        The tensors and the numbers in order of appearance, and a key in which both are only marked.
    """
    tensors: list[torch.Tensor] = []
    numbers: list[Number] = []
    key = tuple([_flatten(a, tensors, numbers) for a in args])
    names = tuple([(k, _flatten(v, tensors, numbers)) for k, v in kwargs.items()]) if kwargs else ()
    return tensors, numbers, (key, names)


_SCALARS = (type(None), bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))


def _flatten(value: Any, tensors: list[torch.Tensor], numbers: list[Number]) -> Hashable:
    kind: type = value.__class__
    if kind is float:
        numbers.append(NAN if value != value else value)
        return float
    if kind is int:
        numbers.append(value)
        return int
    if kind in _SCALARS:
        hashable: Hashable = value
        return hashable
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return torch.Tensor
    if isinstance(value, (tuple, list)):
        return (kind, tuple([_flatten(v, tensors, numbers) for v in value]))
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return (slice, tuple([_flatten(v, tensors, numbers) for v in parts]))
    if isinstance(value, dict):
        return (kind, tuple([(k, _flatten(v, tensors, numbers)) for k, v in value.items()]))
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, (int, float)):
        numbers.append(value)
        return kind
    if isinstance(value, complex):
        return (complex, Exact(value))
    return Opaque(value)


def unflatten(
    key: Hashable, tensors: Sequence[Any], numbers: Sequence[Number]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `flatten` took apart, with other tensors or numbers in their places."""
    tensor, number = iter(tensors), iter(numbers)
    made_by_flatten: Any = key
    args, kwargs = made_by_flatten
    return (
        tuple([_unflatten(a, tensor, number) for a in args]),
        {name: _unflatten(a, tensor, number) for name, a in kwargs},
    )


def _unflatten(key: Any, tensors: Iterator[Any], numbers: Iterator[Number]) -> Any:
    if key is torch.Tensor:
        return next(tensors)
    if isinstance(key, type):
        return next(numbers)
    if isinstance(key, Opaque):
        return key.value
    if not isinstance(key, tuple):
        return key
    kind, items = key
    if kind is complex:
        return items.value
    if issubclass(kind, dict):
        return {name: _unflatten(v, tensors, numbers) for name, v in items}
    values = [_unflatten(v, tensors, numbers) for v in items]
    if kind is list or kind is tuple or kind is torch.Size:
        return kind(values)
    if kind is slice:
        return slice(*values)
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def generators_in(key: Hashable) -> Iterator[torch.Generator]:
    """The random number generators among the arguments."""
    if isinstance(key, tuple):
        for k in key:
            yield from generators_in(k)
    elif isinstance(key, Opaque) and isinstance(key.value, torch.Generator):
        yield key.value


def has_opaque_data(key: Hashable) -> bool:
    """Whether a key holds an object whose contents could change without the key changing."""
    if isinstance(key, Opaque):
        return not isinstance(key.value, (torch.Generator, type)) and not callable(key.value)
    if isinstance(key, tuple):
        return any(has_opaque_data(k) for k in key)
    return False


# --- return values ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTensor:
    """In a template: output number `index` of the event."""

    index: int


@dataclass(frozen=True, slots=True)
class SameTensor:
    """In a template: the very object that was tensor argument `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Container:
    """In a template: a tuple, list or named tuple of items."""

    kind: type
    items: tuple[Any, ...]


def template(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The structure of a returned value, with `leaf` applied to everything that is no container."""
    if isinstance(value, (tuple, list)):
        return Container(type(value), tuple(template(v, leaf) for v in value))
    return leaf(value)


def build(result: Any, new: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """The value that a template stands for."""
    kind = result.__class__
    if kind is NewTensor:
        return new[result.index]
    if kind is SameTensor:
        return arguments[result.index]
    if kind is Container:
        items = [build(r, new, arguments) for r in result.items]
        if result.kind is list:
            return items
        if result.kind is tuple:
            return tuple(items)
        if hasattr(result.kind, "_fields"):
            return result.kind(*items)
        return result.kind(items)
    return result


def new_tensors(result: Any, returned: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensors of a returned value that its template calls new, with their numbers."""
    if isinstance(result, NewTensor):
        yield result.index, returned
    elif isinstance(result, Container):
        for item, value in zip(result.items, returned, strict=True):
            yield from new_tensors(item, value)


def flat(value: Any) -> Iterator[Any]:
    """What tuples and lists hold, however nested, in order."""
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from flat(v)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)


# --- metadata and numbers -----------------------------------------------------------------------


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The metadata of a real tensor (call it where torch functions are not intercepted)."""
    return _meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        _is_leaf(tensor),
    )


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is numbers at places that its strides tell."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def layout_of(tensor: torch.Tensor) -> str:
    """What `is_strided` looks at, in words."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return f"of layout {tensor.layout}"


def hooks_of(tensor: torch.Tensor) -> Hooks:
    """How many hooks a leaf has (call it where torch functions are not intercepted)."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ())


#: Traces hold thousands of metadata, few of them different.
_meta = lru_cache(maxsize=4096)(TensorMeta)


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no history; a view that autograd does not want to be used any more has none."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return True


_SPECIAL = frozenset({0, 1, -1, 2, -2, 0.5, math.inf, -math.inf})


def example_of(number_class: Any) -> float:
    """A number of a class that `number_class` gave."""
    kind, value = number_class[1:]
    return float(value) if kind == "value" else {"nan": NAN, "positive": 3.0, "negative": -3.0}[kind]


def number_class(value: Number) -> Hashable:
    """Numbers of one class are treated alike by PyTorch's own code.

    Composite operations take shortcuts for a few values (dropout with p = 0 draws no random
    numbers) and for signs, so a number may vary only within the classes that traces have shown.
    """
    if value != value:
        return (type(value), "nan", None)
    if value in _SPECIAL:
        return (type(value), "value", value)
    return (type(value), "positive" if value > 0 else "negative", None)
