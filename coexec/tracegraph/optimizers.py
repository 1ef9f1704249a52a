"""The updates of `torch.optim` as single calls.

`Adam.step` makes a dozen torch calls for each parameter, and Python computes a few numbers between them.
All of it follows from the arguments of the functional form (`torch.optim.adam.adam`) and from the step
counters, so that one event can stand for it: the counters are fetched, the numbers are among the event's
own, and the event's operations are those that the functional form ran.

In:  the arguments of a functional form.
Out: whether it can be one event, and the numbers that it will compute.

That these numbers are all there are is not taken on trust: `unexplained` finds others in the recorded
operations.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coexec._native import core
from coexec.tracegraph.numbers import TRANSFORMS, is_number, same_number, takes_numbers
from coexec.tracegraph.trace import Number, Operation

#: Step counters up to here are exact in float32.
_EXACT_STEPS = 2.0**24


@dataclass(frozen=True, slots=True)
class Functional:
    """A functional form: where it is, its lists with one item a parameter, and what it computes.

    `derived` gives the numbers that Python computes from the arguments and the count of steps, this one
    included; None where there are none, and no counter is read.
    """

    module: str
    name: str
    lists: tuple[str, ...]
    derived: Callable[[Mapping[str, Any], float], tuple[Number, ...]] | None


def _of_adam(a: Mapping[str, Any], step: float) -> tuple[Number, ...]:
    decay: Number = 1 - a["lr"] * a["weight_decay"]
    return (decay, a["lr"] / (1 - a["beta1"] ** step), (1 - a["beta2"] ** step) ** 0.5)


def _of_adagrad(a: Mapping[str, Any], step: float) -> tuple[Number, ...]:
    return (a["lr"] / (1 + (step - 1) * a["lr_decay"]),)


FUNCTIONALS = (
    Functional(
        "torch.optim.adam",
        "adam",
        ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
        _of_adam,
    ),
    Functional(
        "torch.optim.adagrad", "adagrad", ("params", "grads", "state_sums", "state_steps"), _of_adagrad
    ),
    Functional("torch.optim.sgd", "sgd", ("params", "d_p_list", "momentum_buffer_list"), None),
    Functional(
        "torch.optim.rmsprop",
        "rmsprop",
        ("params", "grads", "square_avgs", "grad_avgs", "momentum_buffer_list", "state_steps"),
        None,
    ),
)

#: Arguments under which an update reads other tensors' values, or is itself part of a graph.
_NOT_PLAIN = ("capturable", "differentiable", "grad_scale", "found_inf", "has_sparse_grad")
#: Arguments that may be None, for PyTorch to choose.
_OPTIONAL = (*_NOT_PLAIN, "foreach", "fused")
#: Integers that every part of PyTorch can hold.
_INTEGERS = range(-(2**62), 2**62)

#: The functional forms that PyTorch came with. What the user puts in their places is the user's.
ORIGINALS: dict[Functional, Callable[..., None]] = {
    f: getattr(importlib.import_module(f.module), f.name) for f in FUNCTIONALS
}


class Update:
    """The function of an event: a functional form that is given the numbers it will compute, too.

    Attributes:
        trusted: False once an operation had a number that nothing explains.
    """

    def __init__(self, functional: Functional) -> None:
        self.functional = functional
        self.original = ORIGINALS[functional]
        self.trusted = True
        self.__name__ = self.__qualname__ = functional.name
        self.__module__ = functional.module
        parameters = inspect.signature(self.original).parameters.values()
        self._positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._names = frozenset(p.name for p in parameters)
        self._required = frozenset(p.name for p in parameters if p.default is p.empty)

    def __call__(self, derived: tuple[Number, ...], pattern: str, **arguments: Any) -> None:
        """Does what the functional form does."""
        return self.original(**arguments)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name; None if it is not called as it has to be."""
        named = dict(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional) or not named.keys().isdisjoint(kwargs):
            return None
        named |= kwargs
        return named if self._required <= named.keys() <= self._names else None

    def applies(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of the functional form can be one event."""
        if not self.trusted or not self._is_plain(arguments):
            return False
        buffers = arguments.get("momentum_buffer_list")
        if buffers and arguments["momentum"] != 0 and any(b is None for b in buffers):
            return False  # it will make them
        return self.functional.derived is None or _are_counters(arguments["state_steps"])

    def _is_plain(self, arguments: Mapping[str, Any]) -> bool:
        if any(arguments.get(name) is not None and arguments[name] is not False for name in _NOT_PLAIN):
            return False
        lists = [arguments[name] for name in self.functional.lists]
        if not all(v.__class__ in (list, tuple) and len(v) in (0, len(lists[0])) for v in lists):
            return False
        others = ((k, v) for k, v in arguments.items() if k not in self.functional.lists)
        return bool(lists[0]) and all(_is_plain_value(name, value) for name, value in others)

    def counters(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """The step counters that it will look at."""
        return [] if self.functional.derived is None else list(arguments["state_steps"])

    def numbers(
        self, arguments: Mapping[str, Any], counts: Sequence[float]
    ) -> tuple[tuple[Number, ...], str] | None:
        """The numbers that it will compute when the counters have these values; None if that is not known.

        With them, which counters are equal: equal ones have their numbers in common.
        """
        derived = self.functional.derived
        if derived is None:
            return (), ""
        different = {count: position for position, count in enumerate(dict.fromkeys(counts))}
        numbers: list[Number] = []
        for count in different:
            if not (0 <= count < _EXACT_STEPS and count.is_integer()):
                return None
            try:
                numbers += derived(arguments, count + 1)
            except ArithmeticError:
                return None  # it will raise that itself
        if any(n != n for n in numbers):
            return None
        return tuple(numbers), "" if len(different) == 1 else str([different[c] for c in counts])

    def split(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Calls that update one parameter each, or the one call where these might not do the same."""
        if arguments.get("foreach") or arguments.get("fused"):
            return [arguments]
        if any(p.device.type != "cpu" for p in arguments["params"]):
            return [arguments]  # it may choose an implementation for several parameters at once
        lists = {name: arguments[name] for name in self.functional.lists}
        return [
            {**arguments, **{name: values[i : i + 1] for name, values in lists.items()}}
            for i in range(len(arguments["params"]))
        ]

    def unexplained(self, operations: Sequence[Operation], numbers: Sequence[Number]) -> Number | None:
        """A number in its operations that nothing explains: from then on it is not trusted."""
        strange = unexplained(operations, numbers)
        self.trusted = self.trusted and strange is None
        return strange


def updates_several(key: Any) -> bool:
    """Whether an update is one of several parameters at once that could be made one by one, by its key."""
    arguments = dict(key[0][1])
    together = arguments.get("foreach") or arguments.get("fused")
    on_cpu = all(meta.device.type == "cpu" for meta in key[2])
    return not together and on_cpu and len(arguments["params"][1]) > 1


def reads_a_counter(function: Callable[..., Any], operation: Any) -> bool:
    """Whether an operation looks at a step counter: what follows from that is among the event's numbers."""
    return isinstance(function, Update) and operation is torch.ops.aten._local_scalar_dense.default


def _is_plain_value(name: str, value: Any) -> bool:
    if value is None:
        return name in _OPTIONAL
    return value.__class__ in (bool, float) or (value.__class__ is int and value in _INTEGERS)


def _are_counters(counters: Sequence[Any]) -> bool:
    """Whether these are different single numbers, of types in which steps are counted without error."""
    if core is not None and counters.__class__ is list:
        return bool(core.are_counters(counters))
    with torch._C.DisableTorchFunction():
        return len({id(c) for c in counters}) == len(counters) and all(
            isinstance(c, torch.Tensor) and c.dtype in (torch.float32, torch.float64) and c.numel() == 1
            for c in counters
        )


def counts_of(counters: list[torch.Tensor]) -> list[float]:
    """The values of step counters, as a torch call that Python makes."""
    return [float(c.item()) for c in counters]


def updated() -> None:
    """The event that ends every update: whatever way it was made, what comes after it is the same."""


def unexplained(operations: Sequence[Operation], numbers: Sequence[Number]) -> Number | None:
    """A number in the operations of an update that is neither among the event's own nor a constant."""
    known: list[Number] = [f(n) for n in numbers for f in TRANSFORMS.values()]
    known += [0, 1, -1, 2, -2]
    for operation in operations:
        for index, argument in enumerate(operation.args):
            if takes_numbers(operation.target, index):
                for number in _numbers_in(argument):
                    if not any(same_number(number, k) for k in known):
                        return number
    return None


def _numbers_in(argument: Any) -> list[Number]:
    if isinstance(argument, tuple):
        return [n for a in argument for n in _numbers_in(a)]
    return [argument] if is_number(argument) else []


for _function in (counts_of, updated):
    _function.__module__ = "torch.optim"  # where a reader of a TraceGraph expects them
