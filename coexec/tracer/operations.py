"""What the schema of an ATen operation, and the frames around it, say about one call of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from coexec._private import MODE_WRAPPER_FILES, TORCH_DIRECTORY
from coexec.tracegraph import calls, functions
from coexec.tracegraph.trace import Input, Local, Operation, Result, Value

#: Where coexec is.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Between:
    """The Python code that runs between a torch call and one of its operations, innermost first.

    `complete` says whether the torch call was found below it: the engine of autograd has threads.
    """

    codes: tuple[CodeType, ...]
    complete: bool

    def outside_of_torch(self) -> CodeType | None:
        """The first code that is neither PyTorch's own nor coexec's."""
        return next((c for c in self.codes if not c.co_filename.startswith((TORCH_DIRECTORY, PACKAGE))), None)


def frames_between(outermost: Container[CodeType]) -> Between | None:
    """What runs between a code among `outermost` and the dispatch mode that asks; None if only C++ does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(MODE_WRAPPER_FILES):
        frame = frame.f_back
    if frame is None:
        return None
    codes: list[CodeType] = []
    while frame is not None and frame.f_code not in outermost:
        codes.append(frame.f_code)
        frame = frame.f_back
    return Between(tuple(codes), frame is not None)


def written_positions(function: Any, args: tuple[Any, ...]) -> list[int]:
    """The arguments that an operation writes to, those included of which its schema says nothing."""
    positions = [
        i for i, a in enumerate(function._schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    hidden = functions.HIDDEN_WRITES.get(function._schema.name)
    if hidden is not None and hidden[1](args):
        positions += hidden[0]
    return positions


def written_values(function: Any, args: tuple[Any, ...]) -> tuple[Value, ...]:
    """The values among its encoded arguments that an operation writes to."""
    written = (v for p in written_positions(function, args) for v in calls.flat(args[p]))
    return tuple(v for v in written if isinstance(v, (Input, Local)))


def encoded(argument: Any, value_of: Callable[[torch.Tensor], Value]) -> Any:
    """An argument as an `Operation` holds it: lists are tuples, `value_of` names tensors."""
    if isinstance(argument, torch.Tensor):
        return value_of(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(encoded(a, value_of) for a in argument)
    if isinstance(argument, float) and argument != argument:
        return calls.NAN
    return argument


def operation(
    function: Any,
    args: tuple[Any, ...],
    results: Sequence[Result | None],
    *,
    shaped_by_data: bool = False,
    existing: Sequence[Any] = (),
) -> Operation:
    """What ran just now, with encoded arguments."""
    return Operation(
        function,
        args,
        tuple(results),
        written_values(function, args),
        draws(function, args),
        torch.is_grad_enabled(),
        shaped_by_data,
        tuple(existing),
    )


def draws(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation draws random numbers; attention only does if it has a dropout."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    names = [a.name for a in function._schema.arguments]
    return "dropout_p" not in names or args[names.index("dropout_p")] != 0


def depends_on_data(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether values decide about the shape of the result, or leave the tensors."""
    return torch.Tag.data_dependent_output in function.tags or is_shaped_by_data(function, args)


def makes_nothing(function: Any) -> bool:
    """Whether an operation makes memory and writes nothing to it."""
    name: str = function._schema.name
    return name.removeprefix("aten::").removeprefix("new_").startswith("empty")


def reads_values(function: Any) -> bool:
    """Whether an operation looks at more than the geometry of its arguments."""
    name = function._schema.name.removeprefix("aten::")
    is_view = any(r.alias_info is not None for r in function._schema.returns)
    return not (is_view or name.startswith(("new_", "sym_")) or name.endswith("_like"))


def is_shaped_by_data(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether values decide about the shape of the result."""
    if function is torch.ops.aten.index.Tensor:  # only masks select a number of elements that is unknown
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in function.tags


def with_dtype(function: Any, args: tuple[Any, ...], returned: Any) -> tuple[Any, ...]:
    """A factory's arguments with the default dtype written out: it may be another one later."""
    names = [a.name for a in function._schema.arguments]
    if "dtype" not in names or not isinstance(returned, torch.Tensor):
        return args
    index = names.index("dtype")
    return (*args[:index], returned.dtype, *args[index + 1 :]) if args[index] is None else args


def positional_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments by their position in the schema, defaults filled in."""
    out = []
    for index, argument in enumerate(function._schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            out.append(args[index])
        elif argument.name in kwargs:
            out.append(kwargs[argument.name])
        else:
            out.append(argument.default_value)
    return out


def reads_unseen(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    was_read: Sequence[bool],
    operations: Sequence[Operation],
    outputs: Container[Value],
    returned: Any,
) -> bool:
    """Whether a call may have looked at the values of integers without any operation.

    C++ code does so with lengths and split points in the memory of the CPU (`torch.gru` with its
    `batch_sizes`), and goes on with numbers that no argument shows.

    Args:
        function: what was called.
        tensors: its tensor arguments.
        was_read: for each of them, whether an operation has it as an argument.
        operations: what the dispatcher ran.
        outputs: the values of the new tensors that the call returned.
        returned: what it returned; an argument among it was passed on (`cpu()` of what is there).
    """
    if function.__name__ in functions.LOOK_AT_METADATA:
        return False
    passed_on = {id(t) for t in calls.tensors_in(returned)}
    unread = [t for t, read in zip(tensors, was_read, strict=True) if not read and id(t) not in passed_on]
    if any(_may_be_lengths(t.dtype, t.device) and t.numel() for t in unread):
        return True
    used = {v for o in operations for v in calls.flat(o.args)}
    return any(
        o.target is torch.ops.aten._to_copy.default
        and (result := o.results[0]) is not None
        and _may_be_lengths(result.meta.dtype, result.meta.device)
        and Local(position, 0) not in used
        and Local(position, 0) not in outputs
        for position, o in enumerate(operations)
    )


def _may_be_lengths(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and not (dtype.is_floating_point or dtype.is_complex)
