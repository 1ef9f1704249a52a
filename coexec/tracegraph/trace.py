"""What one iteration did: events, the ATen operations inside of them, and how data flows.

In:  what the tracer saw while the program ran eagerly.
Out: a `Trace`, immutable and free of tensors of the program (external tensors are numbers).

There are two levels. *Events* are the calls that Python made; the PythonRunner compares them.
*Operations* are what the dispatcher ran inside of each event; the GraphRunner executes them.
An event reads operations of earlier events only through its `sources`, in order of first use, so two
events that do the same have equal `operations` whatever they are applied to.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from coexec.tracegraph.sizes import Size, varies
from coexec.tracegraph.tape import Passage, Piece, Tape

Number = float | int
Dimension = int | Size
Geometry = tuple[tuple[Dimension, ...], tuple[Dimension, ...]]  # shape and strides


class Kind(enum.Enum):
    """What an event asks of the symbolic graph."""

    COMPUTE = "compute"  #: operations whose results stay tensors
    FETCH = "fetch"  #: Python looks at the values of the tensor arguments


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Everything about a tensor that Python may see without looking at its values.

    Where in its memory a tensor begins is noted but makes no difference: batches are often slices. Sizes that
    vary are expressions in merged traces, see `coexec.tracegraph.generalize`.
    """

    shape: tuple[Dimension, ...]
    stride: tuple[Dimension, ...]
    offset: Dimension = field(compare=False)
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool

    @property
    def is_symbolic(self) -> bool:
        """Whether a size in it varies."""
        return varies(self.shape) or varies(self.stride) or isinstance(self.offset, Size)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]"


# --- references ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Produced:
    """Output `output` of event `event` of the same trace (after merging: of that node)."""

    event: int
    output: int


@dataclass(frozen=True, slots=True)
class External:
    """Tensor `index` in the trace's list of tensors that came from outside of the iteration."""

    index: int


Binding = Produced | External | None  # None: an absent tensor (a gradient that is not there yet)


@dataclass(frozen=True, slots=True)
class Computed:
    """Result `result` of operation `operation` of event `event` of the same trace."""

    event: int
    operation: int
    result: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A small tensor that is determined by the attributes of its event (an index list, for instance)."""

    value: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Constant)
            and other.value.dtype == self.value.dtype
            and torch.equal(other.value, self.value)
        )

    def __hash__(self) -> int:
        return hash((self.value.dtype, tuple(self.value.shape)))


#: `Produced`: a gradient that one piece of a backward pass has from another one.
Source = Computed | Produced | External | Constant


@dataclass(frozen=True, slots=True)
class Input:
    """Inside of an event: its source number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Local:
    """Inside of an event: result `result` of its operation `operation`."""

    operation: int
    result: int


Value = Input | Local


# --- operations and events ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor that an operation returned.

    `alias` is the value whose memory it shares, None for memory of its own.
    """

    meta: TensorMeta
    alias: Value | None


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the dispatcher.

    `args` follow the schema by position (lists are tuples, tensors are `Value`); a result of None was
    a value that existed already, as an in-place operation returns it.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    results: tuple[Result | None, ...]
    writes: tuple[Value, ...]
    random: bool
    grad_mode: bool = False  #: some kernels look at it, although autograd is done
    shaped_by_data: bool = False  #: values decide about the shape of its result
    existing: tuple[Geometry | None, ...] = ()  #: of each result that was a value already

    def __str__(self) -> str:
        return f"{self.target}"


def with_leaves(
    argument: Any, leaf: Callable[[Any], Any], sequence: Callable[[list[Any]], Any] = tuple
) -> Any:
    """An argument of an operation with each part that is no tuple replaced, and each tuple by a `sequence`.

    A function that calls itself is a cycle when it is local: what it refers to stays until it is collected.
    """
    if isinstance(argument, tuple):
        return sequence([with_leaves(a, leaf, sequence) for a in argument])
    return leaf(argument)


@dataclass(frozen=True, slots=True)
class Output:
    """One new tensor object that an event gave to Python."""

    meta: TensorMeta
    value: Value
    history: str | None  #: name of its autograd node, as `repr` shows it
    kept: bool  #: still referenced by the program when the iteration ended
    uid: int  #: names the object across traces, as `ExternalTensor.uid` does


@dataclass(frozen=True, slots=True)
class Grad:
    """The event gave leaf number `leaf` (among `inputs`) a new `.grad`: output `output`."""

    leaf: int
    output: int


@dataclass(frozen=True, slots=True)
class Event:
    """One Python-visible call.

    `key` holds everything besides numbers and tensors that decides what is computed: the structure
    of the arguments, their attributes, the ambient state, and the metadata of the tensors.
    `inputs` are the tensor arguments in order, followed by the `implicit` ones: for an event that
    runs the backward pass, each leaf and the gradient it had. An event with a `piece` is a piece of a
    backward pass; without one, a backward pass has its `passages` if it can be taken to pieces.
    """

    kind: Kind
    function: Callable[..., Any]
    name: str
    key: Hashable
    location: int
    numbers: tuple[Number | Size, ...]
    inputs: tuple[Binding, ...]
    implicit_metas: tuple[TensorMeta | None, ...]
    sources: tuple[Source, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]
    grads: tuple[Grad, ...]
    rebinds: tuple[tuple[int, int], ...]  #: argument objects that are outputs from now on
    result: Any  #: template of the return value (see `calls.build`); of a fetch, the value of each tensor
    backward: bool  #: runs nodes of autograd
    tape: Tape | None = None
    passages: tuple[Passage, ...] | None = None
    piece: Piece | None = None

    @property
    def by_path(self) -> bool:
        """Whether it depends on the whole path before it, and not only on its arguments."""
        return self.backward and self.piece is None

    def made(self, number: int, output: int) -> Source:
        """What an output of this event, event `number` of its trace, is: passed on, or computed here."""
        value = self.outputs[output].value
        if isinstance(value, Input):
            return self.sources[value.index]
        return Computed(number, value.operation, value.result)


#: How many hooks a leaf has: on its gradient, and behind the accumulation of it.
Hooks = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor from outside: `uid` names the object, `storage` its memory, across traces."""

    uid: int
    storage: int
    meta: TensorMeta
    parameter: bool  #: an `nn.Parameter`, which programs use in every iteration
    exposed: bool  #: memory that NumPy may know, and could write to between two calls
    hooks: Hooks = (0, 0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One iteration, from the tape's entry to its exit."""

    events: tuple[Event, ...]
    externals: tuple[ExternalTensor, ...]

    def origin(self, source: Source) -> Computed | External | Constant:
        """What a source is in the end, whatever passed it on."""
        while isinstance(source, Produced):
            source = self.events[source.event].made(source.event, source.output)
        return source


def takes_one_value_twice(event: Event, trace: Trace) -> bool:
    """Whether two tensor objects among the arguments are the same memory, on the path of this trace only.

    Its operations then read one for the other: `y * y.detach()` reads `y` twice, whatever `detach` was called
    on.
    """
    objects: dict[Source, tuple[object, ...]] = {}
    for binding in event.inputs:
        if binding is None:
            continue
        source: Source
        name: tuple[object, ...]
        if isinstance(binding, External):
            source, name = binding, (binding,)
        else:
            made = trace.events[binding.event]
            source = trace.origin(binding)
            name = (binding.event, made.outputs[binding.output].value)  # of one event: the same on all paths
        if objects.setdefault(source, name) != name:
            return True
    return False
