"""The recorded calls of a program.

In:  recordings, by the signature of their call and its numbers.
Out: what a call with the same signature can be answered with.

Numbers that vary (learning rates, step counters) are fed where two recordings explain how they reach
the operations, as in the TraceGraph; see `coexec.tracegraph.numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coexec._native import core
from coexec.dynamic.recorder import Recording
from coexec.runners.native import encoded_instruction
from coexec.runners.walker import NAMES, encoded_meta, encoded_slot
from coexec.tracegraph.ambient import ambient
from coexec.tracegraph.functions import INDEXING
from coexec.tracegraph.graph import FedNumber, NumberOrigin, NumberSlot
from coexec.tracegraph.numbers import agree, agreements, fed_numbers, fit, unify, unify_slots, unused, varying
from coexec.tracegraph.program import Call, Reg, When
from coexec.tracegraph.trace import Input, Local, Number, TensorMeta, with_leaves

#: Variants of one signature: more than this many numbers that nothing explains are not worth a table.
MAX_VARIANTS = 64
#: Elements of the arguments of a call up to which Python makes it itself, unless the queue uses them.
SMALL = 16
#: Signatures in a table; a program that makes ever new shapes would fill the memory.
MAX_SIGNATURES = 20_000


#: Function, attributes, ambient state, metadata of the tensors, and which of them are one object.
Signature = tuple[Callable[..., Any], Hashable, Hashable, tuple[TensorMeta, ...], tuple[int, ...]]

#: Stands for the call where the numbers of a TraceGraph name their node.
_CALL = 0
#: What the sender returns when Python had better make a call itself, at once.
RUN_NOW = object()


@dataclass(frozen=True, slots=True)
class Variant:
    """A recording for the numbers that fit its slots, and its form for the queue."""

    slots: tuple[NumberSlot, ...]
    recording: Recording
    native: Any
    agreements: tuple[tuple[NumberOrigin, ...], ...]

    def takes(self, numbers: Sequence[Number]) -> bool:
        """Whether a call with these numbers does what was recorded."""
        return fit(self.slots, numbers) and all(agree(o, {_CALL: numbers}) for o in self.agreements)


@dataclass(slots=True)
class Entry:
    """What is known of a signature: its variants, or why its calls run eagerly each time.

    `handle` names it in the native sender, once there is a variant. `met` says whether it was met before:
    what happens only once, as in a loop over ever new shapes, is not worth a recording.
    """

    signature: Signature
    met: bool = False
    handle: int | None = None
    variants: list[Variant] = field(default_factory=list)
    eager: str | None = None


class Table:
    """Entries by signature, and the native sender that looks most of them up.

    Args:
        queue: what the sender sends to.
    """

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.sender = core.Sender(queue, NAMES, ambient, RUN_NOW, SMALL)
        self._entries: dict[Signature, Entry] = {}

    def entry(self, signature: Signature) -> Entry:
        """The entry of a signature, a new one at first sight."""
        entry = self._entries.get(signature)
        if entry is None:
            if len(self._entries) >= MAX_SIGNATURES:
                self._entries.clear()
                self.sender.clear()
            entry = self._entries[signature] = Entry(signature)
        return entry

    def add(self, entry: Entry, numbers: Sequence[Number], recording: Recording) -> None:
        """Adds a recording to its entry, generalising a variant that differs in numbers only."""
        for index, variant in enumerate(entry.variants):
            generalised = _generalised(entry.signature[0], variant, numbers, recording)
            if generalised is not None:
                entry.variants[index] = generalised
                break
        else:
            entry.variants.append(variant_of(numbers, recording))
        if len(entry.variants) > MAX_VARIANTS:
            entry.variants.clear()
            entry.eager = "its numbers vary in a way that nothing explains"
        self._publish(entry)

    def _publish(self, entry: Entry) -> None:
        """Lets the sender know; numbers that have to agree are compared in Python."""
        function, key, state, metas, repeated = entry.signature
        if entry.handle is None:
            encoded = [encoded_meta(m) for m in metas]
            entry.handle = self.sender.add(function, key, state, encoded, repeated)
        native = [([encoded_slot(s) for s in v.slots], v.native, v.recording.result) for v in entry.variants]
        self.sender.set(entry.handle, [] if any(v.agreements for v in entry.variants) else native)


def variant_of(numbers: Sequence[Number], recording: Recording) -> Variant:
    """A recording for just the numbers that it was made with."""
    return _variant(tuple(NumberSlot(n) for n in numbers), recording)


def _generalised(
    function: Any, variant: Variant, numbers: Sequence[Number], recording: Recording
) -> Variant | None:
    ours = variant.recording
    if (ours.outputs, ours.metas, ours.result) != (recording.outputs, recording.metas, recording.result):
        return None
    differ = varying(_CALL, variant.slots, numbers)
    operations = unify(ours.operations, recording.operations, differ)
    if operations is None or (function in INDEXING and unused(differ, operations)):
        return None
    return _variant(unify_slots(variant.slots, numbers), replace(ours, operations=operations))


def _variant(slots: tuple[NumberSlot, ...], recording: Recording) -> Variant:
    return Variant(slots, recording, _encoded(recording), agreements(recording.operations))


def _encoded(recording: Recording) -> Any:
    """The recording over registers: arguments first, then fed numbers, then results."""
    inputs = recording.inputs
    fed = dict.fromkeys(f.origins[0] for o in recording.operations for f in fed_numbers(o.args))
    numbers = {origin: inputs + index for index, origin in enumerate(fed)}
    registers: dict[Input | Local, int] = {Input(i): i for i in range(inputs)}
    for position, operation in enumerate(recording.operations):
        for index, result in enumerate(operation.results):
            if result is not None:
                registers[Local(position, index)] = len(registers) + len(numbers)

    def encode(argument: Any) -> Any:
        if isinstance(argument, (Input, Local)):
            return Reg(registers[argument])
        return Reg(numbers[argument.origins[0]]) if isinstance(argument, FedNumber) else argument

    operations = [
        Call(
            o.target,
            with_leaves(o.args, encode),
            tuple(registers.get(Local(position, index)) for index in range(len(o.results))),
            When.NOW,
            -1,
            grad_mode=o.grad_mode,
        )
        for position, o in enumerate(recording.operations)
    ]
    return core.Recorded(
        {
            "registers": len(registers) + len(numbers),
            "calls": [encoded_instruction(c) for c in operations],
            "numbers": [(register, o.slot, o.transform) for o, register in numbers.items()],
            "outputs": [registers[v] for v in recording.outputs],
            "writes": recording.writes,
            "shares_memory": recording.shares_memory,
            "keeps_arguments": recording.keeps_arguments,
            "random": recording.random,
            "metas": [encoded_meta(m) for m in recording.metas],
        }
    )
