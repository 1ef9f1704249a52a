"""The PythonRunner of the dynamic phase: sends recorded calls to the queue, runs the others itself.

In:  every torch call that Python makes inside of the block.
Out: placeholders for what the queue computes; after `synchronize` every object is what it is in eager.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from coexec._native import core
from coexec._private import (
    OwnMode,
    become,
    enter,
    innermost_dispatch_mode,
    is_exposed,
    is_transformed,
    leave,
)
from coexec.dynamic.recorder import record, repeats
from coexec.dynamic.table import RUN_NOW, Entry, Table, Variant, variant_of
from coexec.dynamic.trial import TrialFailed, difference, needs_trial, takes_part_in_autograd
from coexec.runners import random_state
from coexec.runners.placeholder import Guard
from coexec.tracegraph import calls, functions
from coexec.tracegraph.ambient import ambient, restored
from coexec.tracegraph.optimizers import Update, counts_of, updated
from coexec.tracegraph.trace import Number


class DynamicRunner(OwnMode, TorchFunctionMode):
    """Runs one iteration of the dynamic phase. Enter it for the time of the block.

    Attributes:
        waits: why Python had to wait for the queue, and how often.
        stall_s: how long.
    """

    def __init__(self, table: Table, lazy: bool) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.stall_s = 0.0
        self._table = table
        self._queue, self._sender = table.queue, table.sender
        self._step = self._sender.step
        self._suspended = 0
        self._guard = Guard(self._sender.is_symbol, self._bypassed)
        self._guarded = False
        self._queue.begin(not lazy)
        self._sender.begin(self._enter_guard)

    # --- torch calls ------------------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._suspended:
            answer = self._step(function, args, kwargs)
            if answer is RUN_NOW:
                return function(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        kwargs = kwargs or {}
        if function in functions.PASSIVE:
            return self._passive(function, args, kwargs)
        if function in _PASSED_ON or functions.is_annotation(function):
            return function(*args, **kwargs)
        if function in _AT_ONCE and not any(map(self._sender.is_symbol, args)):
            return function(*args, **kwargs)
        if self._suspended:
            return function(*args, **kwargs)
        if function is updated:
            return None
        if function is counts_of:
            return self._counts(args[0])
        if function in functions.FETCH and function not in functions.SHARES_MEMORY:
            return self._fetch(function, args, kwargs)
        if function in _EAGER:
            return self._eagerly(function, args, kwargs, "it is left to Python")
        if function in functions.INDEXING:
            args = functions.with_index_tensors(args)
        if kwargs and not core.is_transformed():
            kwargs = functions.with_numbers(
                function, kwargs, lambda t: self._fetch(torch.Tensor.item, (t,), {})
            )
        tensors, numbers, key = calls.flatten(args, kwargs)
        if functions.is_data(function, tensors, key):
            return function(*args, **kwargs)
        state: Any = ambient(own_modes=int(self._guarded))
        reason = self._unusual(tensors, key, state)
        if reason is not None:
            return self._eagerly(function, args, kwargs, reason)
        metas = tuple([self._sender.meta(t) or calls.meta_of(t) for t in tensors])
        entry = self._table.entry((function, key, state, metas, repeats(tensors)))
        if entry.eager is not None:
            return self._eagerly(function, args, kwargs, entry.eager)
        for variant in entry.variants:
            if variant.takes(numbers):
                if variant.recording.keeps_arguments and any(is_exposed(t) for t in tensors):
                    return self._eagerly(function, args, kwargs, "NumPy shares the memory of a tensor")
                result = variant.recording.result
                return self._sender.send(variant.native, tensors, numbers, function, key, state, result)
        if not entry.met:
            entry.met = True
            return self._eagerly(function, args, kwargs, "it is new")
        return self._record(entry, function, args, kwargs, tensors, numbers)

    def _passive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function == _IS_LEAF and (meta := self._sender.meta(args[0])) is not None:
            return meta.is_leaf
        return function(*args, **kwargs)

    def _unusual(self, tensors: list[torch.Tensor], key: Hashable, state: Any) -> str | None:
        """Why a call cannot be looked up, if it cannot."""
        if core.is_transformed():
            return "a torch.func transform is running"
        if state[1] or state[2] is not None or state[6] or state[7] != (0, False):
            return "inference mode, autocast, anomaly detection, another mode or hooks of autograd are active"
        for tensor in tensors:
            if not self._sender.is_symbol(tensor) and not _is_plain(tensor):
                return "a tensor is not a plain one, or NumPy shares its memory"
        if calls.has_opaque_data(key) or any(True for _ in calls.generators_in(key)):
            return "an argument can only be compared by identity"
        return None

    # --- the queue ----------------------------------------------------------------------------------

    def _enter_guard(self) -> None:
        enter(self._guard)
        self._guarded = True

    def come_apart(self) -> None:
        """Drops what refers back to this runner, when it is not used any more."""
        del self._guard

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
            self._realize()
        if self._guarded and innermost_dispatch_mode() is self._guard:
            leave(self._guard)
            self._guarded = False
            self._sender.set_guarded(False)

    def _redo(self, failed: int) -> None:
        """Makes a call that failed in the queue again, and those after it, as eager would have."""
        if failed < 0:
            return
        for function, key, state, operands, numbers, result, values in self._sender.in_flight(failed):
            tensors = [o if isinstance(o, torch.Tensor) else o.tensor() for o in operands]
            args, kwargs = calls.unflatten(key, tensors, numbers)
            with restored(state):
                returned = function(*args, **kwargs)
            for index, tensor in calls.new_tensors(result, returned):
                values[index].set(tensor)

    def _realize(self) -> None:
        with torch._C.DisableTorchFunction():
            for placeholder, value in self._sender.symbols():
                real = value.tensor()
                if real is not None:  # None: an earlier call failed
                    become(placeholder, real)
        self._sender.settle()

    def _fetch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that looks at the values of its first argument and gives Python no tensors."""
        tensor = args[0] if args else None
        others = list(calls.tensors_in((args[1:], kwargs)))
        if not isinstance(tensor, torch.Tensor) or others:
            return self._eagerly(function, args, kwargs, "it looks at values")
        symbol = self._sender.is_symbol(tensor)
        if not symbol and not _is_plain(tensor):
            return self._eagerly(function, args, kwargs, "it looks at values")
        began = time.perf_counter()
        failed = self._queue.wait(self._sender.written_by(tensor))
        self.stall_s += time.perf_counter() - began
        self._redo(failed)
        real = self._sender.value(tensor).tensor() if symbol else tensor
        return function(real, *args[1:], **kwargs)

    def _counts(self, counters: list[torch.Tensor]) -> list[float]:
        """Step counters, which the latest update may still have to write."""
        if any(map(self._sender.is_symbol, counters)):
            return self._eagerly(counts_of, (counters,), {}, "it looks at values")  # type: ignore[no-any-return]
        began = time.perf_counter()
        failed = self._queue.wait(max(map(self._sender.written_by, counters)))
        self.stall_s += time.perf_counter() - began
        self._redo(failed)
        return counts_of(counters)

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
        self.waits[functions.name_of(function), "it is recorded"] += 1
        self.synchronize()
        restore = random_state.save(random_state.default_generators())
        differentiable = takes_part_in_autograd(tensors)
        returned, recording = record(function, args, kwargs, tensors)
        if isinstance(recording, str):
            entry.eager = recording
            return returned
        if isinstance(function, Update) and function.unexplained(recording.operations, numbers) is not None:
            entry.eager = "it computes numbers in a way that is not known"
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
        self._table.add(entry, numbers, recording)
        return returned

    def _again(
        self, variant: Variant, tensors: list[torch.Tensor], numbers: list[Number]
    ) -> list[torch.Tensor]:
        values = self._queue.run(variant.native, list(tensors), numbers)
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
        and calls.is_strided(tensor)
        and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
        and not is_transformed(tensor)
        and not torch.nn.parameter.is_lazy(tensor)
        and not (tensor.requires_grad and is_exposed(tensor))
    )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_IS_LEAF = getattr(torch.Tensor, "is_leaf").__get__  # noqa: B009  # a getset descriptor
_PASSED_ON = functions.AMBIENT | functions.MARKS
_GRADIENT = frozenset({functions.GET_GRAD, functions.SET_GRAD, functions.DELETE_GRAD})
#: `data` has the memory of a tensor and a version of its own, which what is recorded does not tell apart.
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
_AT_ONCE = _GRADIENT | {_GET_DATA}
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
    | _AT_ONCE
    | {functions.GET_GRAD_FN}
)
