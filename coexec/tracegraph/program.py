"""The flat program of a whole iteration, which GraphRunners execute.

In:  a TraceGraph, lowered by `coexec.tracegraph.symbolic`.
Out: instructions over registers. Two interpreters run them: the native GraphRunner, and the
     reference in `coexec.runners.interpreter`.

A register is written at most once in an iteration. Messages from the PythonRunner arrive in program
order: what it fed, and which case it took. Fetched values have slots, because Python may look at a
value or not.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from coexec.tracegraph.graph import Captured, Fed
from coexec.tracegraph.sizes import Symbol
from coexec.tracegraph.trace import Dimension, TensorMeta


@dataclass(frozen=True, slots=True)
class Reg:
    """In the arguments of a `Call`: the value of register `index`."""

    index: int

    def __str__(self) -> str:
        return f"r{self.index}"


class When(enum.IntEnum):
    """When a call runs: as soon as it can, or after the iteration has been validated."""

    NOW = 0
    COMMIT = 1
    COMMIT_LAST = 2


@dataclass(frozen=True, slots=True)
class Call:
    """Calls an ATen operation; `args` follow its schema, `outs` its flattened tensor results.

    Results have to have these `shapes` (None: any), lest a value decides about a shape unnoticed. A `random`
    one draws random numbers.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    outs: tuple[int | None, ...]
    when: When
    location: int
    release: tuple[int, ...] = ()
    grad_mode: bool = False
    shapes: tuple[tuple[Dimension, ...] | None, ...] = ()
    random: bool = False


@dataclass(frozen=True, slots=True)
class Feed:
    """Waits for a tensor or number from the PythonRunner; `example` describes a tensor.

    What only calls at the commit use is waited for there.
    """

    out: int
    example: Any
    location: int
    when: When = When.NOW
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Publishes a register as fetch `slot`; as a copy if the memory is written later on."""

    slot: int
    source: int
    copy: bool
    location: int
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Copies references from registers to registers."""

    outs: tuple[int, ...]
    sources: tuple[int, ...]
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """Waits for a number from the PythonRunner and goes on at that target (Terra's Case Select)."""

    targets: tuple[int, ...]
    purpose: str
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Jump:
    """Goes on elsewhere."""

    target: int
    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """What a compiled block takes for granted of a tensor that it reads."""

    shape: tuple[Dimension, ...]
    stride: tuple[Dimension, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Compiled:
    """Runs a compiled block on symbols in sizes and registers; a `random` one draws random numbers.

    Results have to have these `dtypes` and `strides`, and those whose sizes vary these `shapes`. Sources have
    to be like `given`, for which the block was made. At the commit a block may write registers.
    """

    library: Any
    sources: tuple[int, ...]
    outs: tuple[int | None, ...]
    release: tuple[int, ...] = ()
    random: bool = False
    symbols: tuple[int, ...] = ()
    shapes: tuple[tuple[Dimension, ...] | None, ...] = ()
    dtypes: tuple[torch.dtype | None, ...] = ()
    strides: tuple[tuple[Dimension, ...] | None, ...] = ()
    when: When = When.NOW
    written: tuple[int, ...] = ()
    given: tuple[Given, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Waits until the PythonRunner has validated the iteration, then runs the calls put off to it."""

    release: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CompiledBlock:
    """What a block was: its operations, how many of these wait for the commit, and what runs them."""

    operations: int
    deferred: int
    executor: str


Instruction = Call | Feed | Fetch | Move | Switch | Jump | Compiled | Commit


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What the PythonRunner sends at a node, in this order.

    Attributes:
        select: number of the alternative to send, for each alternative; None when it makes no difference.
        feeds: tensor arguments to send, for each alternative.
        late: those of them that are sent at the commit instead.
        numbers: number slots to send, the transform of each, and whether it is sent at the commit.
        fetches: fetch slot of each tensor argument of a fetch; None where `direct` has it.
        outputs: register of each output.
        asks: where values decide about shapes, the fetch slots of the sizes of each output.
    """

    select: tuple[int, ...] | None
    feeds: tuple[tuple[int, ...], ...]
    late: frozenset[int]
    numbers: tuple[tuple[int, str, bool], ...]
    fetches: tuple[int, ...]
    outputs: tuple[int, ...]
    asks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Rebase:
    """An output that views an external tensor through its shadow.

    Attributes:
        external: the tensor.
        shift: how many elements behind its beginning the view begins.
        shadow: the register of the shadow, where only some paths make the output a view of it: it is one if
            it has the shadow's memory. None where it always is one.
    """

    external: Captured | Fed
    shift: int
    shadow: int | None


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions, and what both runners have to know to meet.

    Attributes:
        captured: register of each captured external tensor that the program reads.
        plans: what to send at each node.
        edges: numbers to send when an edge of the TraceGraph is taken.
        copied: fetch slots whose memory is written later on, so that Python gets a copy.
        rebased: outputs, (node, output), that view an external tensor through its shadow.
        shadowed: external tensors that are written before the commit, on a copy.
        written: external tensors whose memory the program writes.
        seen: fed tensors on whose memory Python gets results or arrays, so that no copy can be fed.
        random: whether it draws random numbers.
        metas: metadata of the registers that hold tensors.
        kept: registers that Python may read after the end.
        symbols: what each symbol in its sizes may be.
        blocks: (first, last + 1) of every stretch of instructions without control flow.
        compiled: what each block that is not run by `aten` was.
        uncompiled: the instructions that compiled blocks have replaced.
        threads: how many threads its kernels run on; 0 for as many as Python's.
        overwritten: for pieces of backward passes, nodes that may write to what autograd has saved for them.
        parts: into how many parts its large kernels are cut, for another thread to take some of them.
    """

    instructions: tuple[Instruction, ...]
    registers: int
    captured: dict[int, int]
    plans: tuple[NodePlan, ...]
    edges: dict[tuple[int, int], tuple[int, ...]]
    fetch_slots: int
    copied: frozenset[int]
    rebased: dict[tuple[int, int], Rebase]
    shadowed: frozenset[Captured | Fed]
    written: frozenset[Captured | Fed]
    seen: frozenset[Fed]
    random: bool
    metas: dict[int, TensorMeta]
    kept: frozenset[int]
    symbols: tuple[Symbol, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    compiled: tuple[CompiledBlock, ...] = ()
    uncompiled: tuple[Instruction, ...] = ()
    threads: int = 0
    overwritten: Mapping[int, frozenset[int]] = field(default_factory=dict)  # a dataclass's field
    parts: int = 1

    @property
    def asks(self) -> bool:
        """Whether values decide about shapes."""
        return any(p.asks for p in self.plans)

    @property
    def sent_to(self) -> tuple[Instruction, ...]:
        """The instructions that show what is fed and selected, in order."""
        return self.uncompiled or self.instructions
