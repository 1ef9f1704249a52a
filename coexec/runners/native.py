"""The native GraphRunner behind the interface of the interpreted one.

In:  a `Program`, encoded for C++ once.
Out: a runner whose thread never asks for the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coexec._native import core
from coexec.location import describe
from coexec.runners.sizes import encoded as encoded_size
from coexec.tracegraph.program import (
    Call,
    Commit,
    Compiled,
    Feed,
    Fetch,
    Instruction,
    Jump,
    Move,
    Program,
    Reg,
    Switch,
)
from coexec.tracegraph.sizes import Size, varies
from coexec.tracegraph.trace import Dimension


class NativeRunner:
    """Runs programs on a C++ thread; see `coexec.runners.graph_runner`.

    One that is made with another runner shares its thread, which executes their iterations one after another.
    """

    def __init__(self, before: NativeRunner | None = None) -> None:
        self.core: Any = core.Runner() if before is None else core.Runner(before.core)
        self.watched = False  # somebody times what Python waits for
        self.send = self.core.send
        self.bind = self.core.bind
        self.bound = self.core.bound
        self.fetch = self.core.fetch
        self.commit = self.core.commit
        self.wait_for_commit = self.core.wait_for_commit
        self.wait = self.core.wait
        self.join = self.core.join
        self.wait_for_draws = self.core.wait_for_draws
        self.cancel = self.core.cancel
        self.committing = self.core.committing
        self.finish = self.core.finish
        self.value = self.core.value
        self.times = self.core.times

    def begin(self, program: Program, captured: Sequence[torch.Tensor], start: bool) -> None:
        """Starts an iteration; `captured` are the tensors of `program.captured`, in its order."""
        self.core.begin(encoded(program), list(captured), start)

    def record_spans(self, on: bool) -> None:
        """Lets the thread keep when it executes and when it waits, or stops that."""
        self.watched = on
        self.core.record_spans(on)

    def take_spans(self) -> Sequence[tuple[float, float, bool]]:
        """Begin and end of each execution and wait, and whether it was a wait."""
        spans: Sequence[tuple[float, float, bool]] = self.core.take_spans()
        return spans


_cache: dict[int, tuple[Program, Any]] = {}


def encoded(program: Program) -> Any:
    """The program in C++; made once for each program object."""
    entry = _cache.get(id(program))
    if entry is None or entry[0] is not program:
        native = core.Program(
            program.registers,
            list(program.captured.values()),
            program.fetch_slots,
            len(program.symbols),
            program.threads,
            program.parts > 1,
            [encoded_instruction(i) for i in program.instructions],
        )
        entry = _cache[id(program)] = (program, native)
    return entry[1]


def forget(program: Program) -> None:
    """Drops the encoded form of a program that will not run again."""
    _cache.pop(id(program), None)


def encoded_instruction(instruction: Instruction) -> dict[str, Any]:
    """An instruction as the native code reads it."""
    out: dict[str, Any] = {
        "opcode": type(instruction).__name__,
        "when": 0,
        "outs": [],
        "ins": [],
        "targets": [],
        "release": list(instruction.release),
        "where": "",
        "slot": 0,
        "grad_mode": False,
        "shapes": [],
        "symbols": [],
        "copy": False,
        "written": [],
        "draws": isinstance(instruction, (Call, Compiled)) and instruction.random,
    }
    match instruction:
        case Call():
            name, _, overload = instruction.target._schema.name, None, instruction.target._overloadname
            out |= {
                "name": name,
                "overload": "" if overload == "default" else overload,
                "arguments": [_encode_argument(a) for a in instruction.args],
                "outs": _or_minus_one(instruction.outs),
                "when": int(instruction.when),
                "grad_mode": instruction.grad_mode,
                "shapes": list(map(_encode_shape, instruction.shapes)),
                "where": describe(instruction.location),
            }
        case Feed():
            out |= {"outs": [instruction.out], "when": int(instruction.when)}
        case Fetch():
            out |= {"ins": [instruction.source], "slot": instruction.slot, "copy": instruction.copy}
        case Move():
            out |= {"outs": list(instruction.outs), "ins": list(instruction.sources)}
        case Switch():
            out["targets"] = list(instruction.targets)
        case Jump():
            out["targets"] = [instruction.target]
        case Compiled():
            out |= {
                "library": instruction.library,
                "ins": list(instruction.sources),
                "symbols": list(instruction.symbols),
                "when": int(instruction.when),
                "written": list(instruction.written),
                "strides": [None, *(None if s is None else list(s) for s in instruction.strides)],
                "dtypes": [-1, *(-1 if d is None else core.scalar_type(d) for d in instruction.dtypes)],
                "shapes": [None, *map(_encode_shape, instruction.shapes)],
                "outs": [-1, *_or_minus_one(instruction.outs)],  # the token comes first
                "given": [
                    (
                        _encode_shape(g.shape),
                        None if varies(g.stride) else list(g.stride),
                        core.scalar_type(g.dtype),
                    )
                    for g in instruction.given
                ],
            }
        case Commit():
            pass
    return out


def _or_minus_one(outs: Sequence[int | None]) -> list[int]:
    return [-1 if o is None else o for o in outs]


def _encode_shape(shape: Sequence[Dimension] | None) -> list[Any] | None:
    return None if shape is None else [encoded_size(d) for d in shape]


def _encode_argument(argument: Any) -> tuple[str, Any]:
    if isinstance(argument, Reg):
        return ("r", argument.index)
    if isinstance(argument, Size):
        return ("s", encoded_size(argument))
    if isinstance(argument, tuple):
        if _holds_register(argument) or varies(argument):
            return ("l", [_encode_argument(a) for a in argument])
        return ("c", list(argument))
    return ("c", argument)


def _holds_register(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_holds_register(a) for a in argument)
    return isinstance(argument, Reg)
