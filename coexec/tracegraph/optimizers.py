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

from coexec.tracegraph.numbers import TRANSFORMS, is_number, same_number, takes_numbers
from coexec.tracegraph.trace import Number, Operation

#: Step counters up to here are exact in float32, in which PyTorch keeps them.
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


class Update:
    """The function of an event: a functional form that is given the numbers it will compute, too.

    Attributes:
        trusted: False once an operation had a number that nothing explains.
    """

    def __init__(self, functional: Functional, original: Callable[..., None]) -> None:
        self.functional = functional
        self.original = original
        self.trusted = True
        self.__name__ = self.__qualname__ = functional.name
        self.__module__ = functional.module
        self._parameters = tuple(inspect.signature(original).parameters)

    def __call__(self, derived: tuple[Number, ...], **arguments: Any) -> None:
        """Does what the functional form does."""
        return self.original(**arguments)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return dict(zip(self._parameters, args, strict=False)) | dict(kwargs)

    def applies(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of the functional form can be one event."""
        if not self.trusted or not arguments["params"]:
            return False
        if any(arguments.get(name) is not None and arguments[name] is not False for name in _NOT_PLAIN):
            return False
        buffers = arguments.get("momentum_buffer_list")
        if buffers and arguments["momentum"] != 0 and any(b is None for b in buffers):
            return False  # it will make them
        others = (v for k, v in arguments.items() if k not in self.functional.lists)
        return all(v is None or v.__class__ in (bool, float, int) for v in others)

    def counters(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """The step counters that it will look at."""
        return [] if self.functional.derived is None else list(arguments["state_steps"])

    def numbers(self, arguments: Mapping[str, Any], counts: Sequence[float]) -> tuple[Number, ...] | None:
        """The numbers that it will compute when the counters have these values; None if that is not known."""
        derived = self.functional.derived
        if derived is None:
            return ()
        numbers: list[Number] = []
        for count in dict.fromkeys(counts):
            if not 0 <= count < _EXACT_STEPS:
                return None
            try:
                numbers += derived(arguments, count + 1)
            except ArithmeticError:
                return None  # it will raise that itself
        return tuple(numbers)

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


_updates: dict[tuple[str, Callable[..., None]], Update] = {}


def update_of(functional: Functional) -> Update:
    """The event function for what is the functional form now; the same one as long as that is the same."""
    original = getattr(importlib.import_module(functional.module), functional.name)
    key = (functional.name, original)
    if key not in _updates:
        _updates[key] = Update(functional, original)
    return _updates[key]


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
