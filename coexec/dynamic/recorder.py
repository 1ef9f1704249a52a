"""Runs one torch call eagerly and records the ATen operations in it.

In:  the call, on real tensors.
Out: what it returned, and a `Recording` of it, or why there is none.

The operations are those below autograd; run again with autograd they make eager's graph, which
`coexec.dynamic.trial` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coexec._private import HigherOrderOperator, run_seen, runs_python, shapes_without_values
from coexec.tracegraph import calls, functions
from coexec.tracegraph.optimizers import reads_a_counter
from coexec.tracegraph.schema import VIEWS
from coexec.tracegraph.trace import Input, Local, Operation, Result, TensorMeta, Value
from coexec.tracer.memory import Geometry, geometry_of, storage_id
from coexec.tracer.operations import (
    depends_on_data,
    encoded,
    frames_between,
    operation,
    positional_arguments,
    reads_unseen,
    with_dtype,
    written_positions,
)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a call does, independent of the tensors that it does it to.

    Attributes:
        inputs: how many tensor arguments the call has.
        operations: over the call's tensor arguments (`Input`) and earlier results (`Local`).
        outputs: the new tensors that Python got.
        metas: their metadata.
        result: template of what was returned (see `calls.build`).
        random: whether it draws random numbers.
        writes: whether it writes to the memory of an argument.
        shares_memory: whether it writes to an argument, or returns a view of one.
    """

    inputs: int
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]
    metas: tuple[TensorMeta, ...]
    result: Any
    random: bool
    writes: bool
    shares_memory: bool

    @property
    def keeps_arguments(self) -> bool:
        """Whether a copy of an argument would not do: a result is on its memory, or autograd may save it."""
        return self.shares_memory or any(m.requires_grad for m in self.metas)


def repeats(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each argument the first one that is the same object: a call with one tensor twice is another."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)])


class Unrecordable(Exception):
    """Why a call has to run eagerly each time."""


def record(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
) -> tuple[Any, Recording | str]:
    """Runs a call and records it.

    Args:
        function: what Python called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        tensors: the tensors among them, in order; all real.

    Returns:
        What the call returned, and its recording or the reason why there is none.

    Raises:
        Exception: what the call raised.
    """
    before = [calls.meta_of(t) for t in tensors]
    mode = _Operations(function, tensors)
    with mode:
        returned = _run(function, args, kwargs)
    if mode.failure is not None:
        return returned, mode.failure
    try:
        if any(calls.meta_of(t) != m for t, m in zip(tensors, before, strict=True)):
            raise Unrecordable("it changes the attributes of a tensor")
        outputs: list[torch.Tensor] = []
        result = calls.template(returned, lambda leaf: _returned(leaf, tensors, outputs))
        values = tuple(mode.output(t) for t in outputs)
        if len(set(values)) < len(values):
            raise Unrecordable("it returns a tensor twice")
        read = {v for o in mode.operations for v in calls.flat(o.args)}
        was_read = [Input(i) in read for i in repeats(tensors)]
        if reads_unseen(function, tensors, was_read, mode.operations, values, returned):
            raise Unrecordable("it may look at the values of an integer tensor")
        if _shapes_depend_on_values(function, args, kwargs, tensors, returned, mode.operations):
            raise Unrecordable("the shape of what it returns may depend on values")
    except Unrecordable as e:
        return returned, str(e)
    writes = bool(mode.written & mode.memory)
    recording = Recording(
        len(tensors),
        tuple(mode.operations),
        values,
        tuple(calls.meta_of(t) for t in outputs),
        result,
        any(o.random for o in mode.operations),
        writes,
        writes or any(storage_id(t) in mode.memory for t in outputs),
    )
    return returned, recording


def _run(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _returned(leaf: Any, arguments: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> Any:
    if leaf is None:
        return None
    for index, argument in enumerate(arguments):
        if argument is leaf:
            return calls.SameTensor(index)
    if type(leaf) is not torch.Tensor or leaf.is_conj() or leaf.is_neg() or leaf.is_meta:
        raise Unrecordable(f"it returns a {type(leaf).__name__}")
    outputs.append(leaf)
    return calls.NewTensor(len(outputs) - 1)


def _shapes_depend_on_values(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    returned: Any,
    operations: Sequence[Operation],
) -> bool:
    """Whether metadata alone does not tell what is returned; only integers can decide about shapes."""
    if all(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors):
        return False
    targets = {o.target for o in operations}
    if targets <= _SHAPED_BY_METADATA:
        return False
    shapes = [tuple(t.shape) for t in calls.tensors_in(returned)]
    if shapes_without_values(function, args, kwargs) != shapes:
        return True
    _SHAPED_BY_METADATA.update(targets)
    return False


#: Operations whose shapes were found to follow from metadata, also with integers among the arguments.
_SHAPED_BY_METADATA: set[torch._ops.OpOverload] = set()


class _Operations(TorchDispatchMode):
    """Collects the operations of one call."""

    supports_higher_order_operators = True

    def __init__(self, call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call
        self.operations: list[Operation] = []
        self.failure: str | None = None
        self.memory = {storage_id(t) for t in tensors}  # of the arguments
        self.written: set[int] = set()  # memory that operations wrote to
        self._held: list[torch.Tensor] = []  # while they live, their ids are their own
        self._by_object: dict[int, Value] = {}
        self._by_geometry: dict[Geometry, Value | None] = {}
        for index, tensor in enumerate(tensors):
            if id(tensor) not in self._by_object:
                ambiguous = geometry_of(tensor) in self._by_geometry  # another object, the same memory
                self._name(tensor, Input(index))
                if ambiguous:
                    self._by_geometry[geometry_of(tensor)] = None

    def output(self, tensor: torch.Tensor) -> Local:
        """The value that a returned tensor is."""
        value = self._value(tensor)
        if not isinstance(value, Local):
            raise Unrecordable("it returns a tensor that no operation made")
        return value

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, HigherOrderOperator):
            self.failure = self.failure or "it calls functions of the user"
        unseen = (
            reads_a_counter(self._call, function) or function.namespace in functions.ANNOTATING_NAMESPACES
        )
        if self.failure is not None or unseen:
            return run_seen(function, args, kwargs)
        with torch._C.DisableTorchFunction():
            try:
                positional = positional_arguments(function, args, kwargs)
                self._check(function, positional)
                values = tuple(encoded(a, self._value) for a in positional)
            except Unrecordable as e:
                self.failure = str(e)
                return run_seen(function, args, kwargs)
            returned = run_seen(function, args, kwargs)
            try:
                self._add(function, positional, values, returned)
            except Unrecordable as e:
                self.failure = str(e)
            return returned

    def _check(self, function: Any, positional: list[Any]) -> None:
        between = frames_between({_run.__code__})
        stranger = None if between is None else between.outside_of_torch()
        if between is None or stranger is not None:
            raise Unrecordable("user code runs inside of it")
        if runs_python(function, positional):
            raise Unrecordable(f"{function} is implemented in Python")
        if torch.Tag.inplace_view in function.tags and not self._is_own_view(function, positional[0]):
            raise Unrecordable(f"{function} changes a tensor's geometry in place")
        if depends_on_data(function, tuple(positional)):
            raise Unrecordable(f"the result of {function} depends on values")
        if any(isinstance(a, torch.Generator) for a in positional):
            raise Unrecordable("it is given a generator")

    def _is_own_view(self, function: Any, tensor: torch.Tensor) -> bool:
        """Whether an operation changes the geometry of a tensor that another one has made."""
        return function in VIEWS and isinstance(self._value(tensor), Local)

    def _add(self, function: Any, positional: list[Any], args: tuple[Any, ...], returned: Any) -> None:
        if function in VIEWS:
            self._name(returned, Local(len(self.operations), 0))
            result = Result(calls.meta_of(returned), None)
            self.operations.append(operation(VIEWS[function], args, [result]))
            return
        if not any(True for _ in calls.tensors_in(positional)):
            args = with_dtype(function, args, returned)
        number = len(self.operations)
        in_place = [r.alias_info is not None and r.alias_info.is_write for r in function._schema.returns]
        results: list[Result | None] = []
        for index, tensor in enumerate(calls.flat(returned if in_place else ())):
            if tensor is None or (index < len(in_place) and in_place[index]):
                results.append(None)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise Unrecordable(f"{function} returns a {type(tensor).__name__}")
            if not calls.is_strided(tensor):
                raise Unrecordable(f"{function} returns a tensor that is {calls.layout_of(tensor)}")
            results.append(Result(calls.meta_of(tensor), None))
            self._name(tensor, Local(number, index))
        written = (positional[p] for p in written_positions(function, args))
        self.written |= {storage_id(t) for t in calls.tensors_in(list(written))}
        self.operations.append(operation(function, args, results))

    def _name(self, tensor: torch.Tensor, value: Value) -> None:
        self._held.append(tensor)
        self._by_object[id(tensor)] = value
        self._by_geometry[geometry_of(tensor)] = value

    def _value(self, tensor: torch.Tensor) -> Value:
        if not calls.is_strided(tensor):
            raise Unrecordable(f"it uses a tensor that is {calls.layout_of(tensor)}")
        value = self._by_object.get(id(tensor))
        if value is None:  # autograd has made another object of it
            value = self._by_geometry.get(geometry_of(tensor))
        if value is None:
            raise Unrecordable("it uses a tensor that is not among its arguments")
        return value
