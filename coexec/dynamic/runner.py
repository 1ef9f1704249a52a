"""The PythonRunner of the dynamic phase: sends recorded calls to the queue, runs the others itself.

In:  every torch call that Python makes inside of the block.
Out: placeholders for what the queue computes; after `synchronize` every object is what it is in eager.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from coexec._native import core
from coexec._private import become, copied, enter, innermost_dispatch_mode, is_exposed, is_transformed, leave
from coexec.dynamic.recorder import record
from coexec.dynamic.table import Entry, Table, Variant, add, variant_of
from coexec.dynamic.trial import TrialFailed, difference, needs_trial, takes_part_in_autograd
from coexec.runners import random_state
from coexec.runners.placeholder import Guard
from coexec.tracegraph import calls, functions
from coexec.tracegraph.ambient import ambient, restored
from coexec.tracegraph.trace import Number, TensorMeta


@dataclass(slots=True)
class _Symbol:
    """A placeholder (held by the program only), how it looks, and what it will be."""

    reference: weakref.ref[torch.Tensor]
    meta: TensorMeta
    value: Any


@dataclass(slots=True)
class _Sent:
    """A call in the queue, with what is needed to make it again."""

    number: int
    function: Callable[..., Any]
    key: Hashable
    state: Hashable
    operands: list[Any]
    numbers: list[Number]
    result: Any
    values: list[Any]


class DynamicRunner(TorchFunctionMode):
    """Runs one iteration of the dynamic phase. Enter it for the time of the block.

    Attributes:
        waits: why Python had to wait for the queue, and how often.
        stall_s: how long.
        sent: how many calls were sent to the queue.
    """

    def __init__(self, table: Table, queue: Any, lazy: bool) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.stall_s = 0.0
        self.sent = 0
        self._table = table
        self._queue = queue
        self._symbols: dict[int, _Symbol] = {}
        self._in_flight: deque[_Sent] = deque()
        self._suspended = 0
        self._guard = Guard(lambda t: id(t) in self._symbols, self._bypassed)
        self._guarded = False
        self._fingerprint: Any = None
        self._state: Any = None
        queue.begin(not lazy)

    # --- torch calls ------------------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in functions.PASSIVE:
            return self._passive(function, args, kwargs)
        if function in _PASSED_ON or functions.is_annotation(function):
            return function(*args, **kwargs)
        if function in _GRADIENT and not any(id(a) in self._symbols for a in args):
            return function(*args, **kwargs)
        if self._suspended:
            return function(*args, **kwargs)
        if function in functions.FETCH and function not in functions.SHARES_MEMORY:
            return self._fetch(function, args, kwargs)
        if function in _EAGER:
            return self._eagerly(function, args, kwargs, "it is left to Python")
        if function in functions.INDEXING:
            args = functions.with_index_tensors(args)
        tensors, numbers, key = calls.flatten(args, kwargs)
        if functions.is_data(function, tensors, key):
            return function(*args, **kwargs)
        reason = self._unusual(tensors, key)
        if reason is not None:
            return self._eagerly(function, args, kwargs, reason)
        metas = tuple([self._meta(t) for t in tensors])
        entry = self._table.entry((function, key, self._state, metas))
        if entry.eager is not None:
            return self._eagerly(function, args, kwargs, entry.eager)
        for variant in entry.variants:
            if variant.takes(numbers):
                if variant.recording.shares_memory and any(is_exposed(t) for t in tensors):
                    return self._eagerly(function, args, kwargs, "NumPy shares the memory of a tensor")
                return self._send(variant, function, key, tensors, numbers)
        return self._record(entry, function, args, kwargs, tensors, numbers)

    def _passive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function == _IS_LEAF and id(args[0]) in self._symbols:
            return self._symbols[id(args[0])].meta.is_leaf
        return function(*args, **kwargs)

    def _unusual(self, tensors: list[torch.Tensor], key: Hashable) -> str | None:
        """Why a call cannot be looked up, if it cannot."""
        fingerprint = core.ambient_fingerprint()
        if core.is_transformed():
            return "a torch.func transform is running"
        if fingerprint != self._fingerprint:
            self._fingerprint = fingerprint
            self._state = ambient(own_modes=int(self._guarded))
        state = self._state
        if state[1] or state[2] is not None or state[6] or state[7] != (0, False):
            return (
                "inference mode, autocast, anomaly detection, another mode or saved tensor hooks are active"
            )
        for tensor in tensors:
            if id(tensor) not in self._symbols and not _is_plain(tensor):
                return "a tensor is not a plain one, or NumPy shares its memory"
        if calls.has_opaque_data(key) or any(True for _ in calls.generators_in(key)):
            return "an argument can only be compared by identity"
        return None

    def _meta(self, tensor: torch.Tensor) -> TensorMeta:
        symbol = self._symbols.get(id(tensor))
        return calls.meta_of(tensor) if symbol is None else symbol.meta

    # --- the queue ----------------------------------------------------------------------------------

    def _send(
        self,
        variant: Variant,
        function: Callable[..., Any],
        key: Hashable,
        tensors: list[torch.Tensor],
        numbers: list[Number],
    ) -> Any:
        """Lets the queue run a recorded call; Python goes on with placeholders."""
        operands = [self._operand(t) for t in tensors]
        result, queue, in_flight = variant.recording.result, self._queue, self._in_flight
        placeholders, values = queue.run(variant.native, operands, numbers)
        self.sent += 1
        done = queue.ran()
        while in_flight and in_flight[0].number <= done:
            in_flight.popleft()
        sent = _Sent(queue.sent(), function, key, self._state, operands, numbers, result, values)
        in_flight.append(sent)
        for placeholder, meta, value in zip(placeholders, variant.recording.metas, values, strict=True):
            self._add(placeholder, meta, value)
        return calls.build(result, placeholders, tensors)

    def _operand(self, tensor: torch.Tensor) -> Any:
        symbol = self._symbols.get(id(tensor))
        if symbol is not None:
            return symbol.value
        return copied(tensor) if is_exposed(tensor) else tensor

    def _add(self, placeholder: torch.Tensor, meta: TensorMeta, value: Any) -> None:
        if not self._guarded:
            enter(self._guard)
            self._guarded = True
        key, symbols = id(placeholder), self._symbols

        def forget(_: object) -> None:
            symbols.pop(key, None)

        symbols[key] = _Symbol(weakref.ref(placeholder, forget), meta, value)

    def synchronize(self) -> None:
        """Waits until the queue is empty; every placeholder is the real tensor when this returns.

        Raises:
            Exception: what a call raised that was sent before, as eager would have raised it there.
        """
        began = time.perf_counter()
        failed = self._queue.drain()
        self.stall_s += time.perf_counter() - began
        try:
            self._redo(failed)
        finally:
            self._in_flight.clear()
            self._realize()
        if self._guarded and innermost_dispatch_mode() is self._guard:
            leave(self._guard)
            self._guarded = False

    def _redo(self, failed: int) -> None:
        """Makes a call that failed in the queue again, and those after it, as eager would have."""
        if failed < 0:
            return
        for sent in self._in_flight:
            if sent.number < failed:
                continue
            tensors = [o if isinstance(o, torch.Tensor) else o.tensor() for o in sent.operands]
            args, kwargs = calls.unflatten(sent.key, tensors, sent.numbers)
            with restored(sent.state):
                returned = sent.function(*args, **kwargs)
            for index, tensor in calls.new_tensors(sent.result, returned):
                sent.values[index].set(tensor)

    def _realize(self) -> None:
        with torch._C.DisableTorchFunction():
            for symbol in list(self._symbols.values()):
                placeholder, real = symbol.reference(), symbol.value.tensor()
                if placeholder is not None and real is not None:  # None: an earlier call failed
                    become(placeholder, real)
            self._symbols.clear()

    def _fetch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that looks at values and gives Python something else than tensors."""
        for tensor in calls.tensors_in((args, kwargs)):
            symbol = self._symbols.get(id(tensor))
            if symbol is None or tensor is not args[0]:
                return self._eagerly(function, args, kwargs, "it looks at values")
        began = time.perf_counter()
        value = self._symbols[id(args[0])].value
        failed = self._queue.wait(value)
        self.stall_s += time.perf_counter() - began
        if failed >= 0:
            self._redo(failed)
        return function(value.tensor(), *args[1:], **kwargs)

    # --- calls that Python runs -----------------------------------------------------------------------

    def _eagerly(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        self.waits[functions.name_of(function), why] += 1
        self.synchronize()
        return function(*args, **kwargs)

    def _record(
        self,
        entry: Entry,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        numbers: list[Number],
    ) -> Any:
        """Runs a call eagerly and records it for the next time."""
        self.waits[functions.name_of(function), "it is new"] += 1
        self.synchronize()
        restore = random_state.save(random_state.default_generators())
        differentiable = takes_part_in_autograd(tensors)
        returned, recording = record(function, args, kwargs, tensors)
        if isinstance(recording, str):
            entry.eager = recording
            return returned
        if recording.writes:
            if differentiable and len(recording.operations) > 1:
                entry.eager = "it writes to tensors that autograd follows"
                return returned
        elif needs_trial(recording, tensors):
            outputs = [t for _, t in calls.new_tensors(recording.result, returned)]
            variant = variant_of(numbers, recording)
            after = random_state.save(random_state.default_generators())
            restore()
            entry.eager = difference(outputs, lambda: self._again(variant, tensors, numbers))
            after()
            if entry.eager is not None:
                return returned
        add(entry, numbers, recording)
        return returned

    def _again(
        self, variant: Variant, tensors: list[torch.Tensor], numbers: list[Number]
    ) -> list[torch.Tensor]:
        _, values = self._queue.run(variant.native, list(tensors), numbers)
        if self._queue.drain() >= 0:
            raise TrialFailed
        return [v.tensor() for v in values]

    # --- what passes no torch function -----------------------------------------------------------------

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """For the time in which C++ code keeps hold of tensors that Python gave it."""
        self.synchronize()
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def _bypassed(self, function: Any) -> None:
        self.waits[str(function), "it passes no torch function"] += 1
        self.synchronize()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        (tensor.__class__ in _PLAIN or isinstance(tensor, torch.nn.Parameter))
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
        and not is_transformed(tensor)
        and not torch.nn.parameter.is_lazy(tensor)
        and not (tensor.requires_grad and is_exposed(tensor))
    )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_IS_LEAF = getattr(torch.Tensor, "is_leaf").__get__  # noqa: B009  # a getset descriptor
_PASSED_ON = functions.AMBIENT | functions.MARKS
_GRADIENT = frozenset({functions.GET_GRAD, functions.SET_GRAD, functions.DELETE_GRAD})
_SETTERS = frozenset(
    getattr(torch.Tensor, n).__set__
    for n in dir(torch.Tensor)
    if type(getattr(torch.Tensor, n, None)).__name__ == "getset_descriptor"
)
_EAGER = (
    functions.BACKWARD
    | functions.UNSUPPORTED
    | functions.SHARES_MEMORY
    | functions.SET_REQUIRES_GRAD
    | _SETTERS
    | _GRADIENT
    | {functions.GET_GRAD_FN}
)
