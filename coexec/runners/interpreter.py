"""The GraphRunner in Python: the same instructions as the native one, on an ordinary thread.

It is the reference that the native GraphRunner is tested against, and stands in for it where no C++
compiler was found. It needs the GIL for every instruction, so it overlaps with Python badly.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from coexec._private import BelowAutograd
from coexec.location import describe
from coexec.tracegraph.calls import flat
from coexec.tracegraph.copies import copied
from coexec.tracegraph.instructions import reads, writes
from coexec.tracegraph.program import (
    Call,
    Commit,
    Compiled,
    Feed,
    Fetch,
    Jump,
    Move,
    Program,
    Reg,
    Switch,
    When,
)
from coexec.tracegraph.schema import by_schema
from coexec.tracegraph.sizes import Size, value_of


class Cancelled(Exception):
    """The iteration was given up."""


class InterpretedRunner:
    """A GraphRunner whose thread interprets instructions; see `coexec.runners.graph_runner`."""

    def __init__(self) -> None:
        self._start = threading.Event()
        self._done = threading.Event()
        self._condition = threading.Condition()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._busy_s = self._stall_s = 0.0
        self._records = False
        self._spans: list[tuple[float, float, bool]] = []
        self._thread: threading.Thread | None = None

    def begin(self, program: Program, captured: Sequence[torch.Tensor], start: bool) -> None:
        """Starts an iteration; `captured` are the tensors of `program.captured`, in its order."""
        self._program = program
        self._values: list[Any] = [None] * program.registers
        for register, tensor in zip(program.captured.values(), captured, strict=True):
            self._values[register] = tensor
        self._published: dict[int, Any] = {}
        self._symbols: dict[int, int] = {}
        self._messages = queue.SimpleQueue()
        self._cancelled = self._committed = self._committing = False
        self._error: BaseException | None = None
        self._start.clear()
        self._done.clear()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="coexec-graph-runner", daemon=True)
        self._thread.start()
        if start:
            self._start.set()

    def send(self, message: Any) -> None:
        """Feeds a tensor or number, or tells which case was taken."""
        self._messages.put(message)

    def bind(self, symbol: int, value: int) -> None:
        """Tells what a symbol in sizes is in this iteration."""
        with self._condition:
            self._symbols[symbol] = value
            self._condition.notify_all()

    def bound(self, symbol: int) -> int | None:
        """What a symbol is, None if it is not known yet."""
        return self._symbols.get(symbol)

    def fetch(self, slot: int) -> Any:
        """The value of a fetch slot, once it is there."""
        self._start.set()
        with self._condition:
            while slot not in self._published and not self._done.is_set():
                self._condition.wait(0.05)
            if slot not in self._published:
                raise self._error or RuntimeError("the GraphRunner ended without publishing the value")
            return self._published[slot]

    def commit(self) -> None:
        """Lets the calls run that were put off until the iteration is valid."""
        with self._condition:
            self._committed = True
            self._condition.notify_all()
        self._start.set()

    def wait(self) -> None:
        """Waits until the program has ended; raises what failed in it."""
        while not self._done.wait(0.05):
            pass
        if self._error is not None:
            raise self._error

    def wait_for_commit(self) -> bool:
        """Does not wait."""
        return False

    def join(self) -> None:
        """Waits for the end, whatever it is."""
        self._done.wait()

    def wait_for_draws(self) -> bool:
        """Waits for the end, when no more random numbers are drawn."""
        self.join()
        return False

    def cancel(self) -> None:
        """Gives the iteration up and waits until nothing of it runs any more."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()
        self._messages.put(None)
        self._start.set()
        if self._thread is not None:
            self._thread.join()

    def committing(self) -> bool:
        """Whether calls that were put off to the commit have begun to run."""
        return self._committing

    def finish(self) -> None:
        """Drops all values of the iteration."""
        if self._thread is not None:
            self._thread.join()
        self._values = []
        self._published = {}

    def value(self, register: int) -> Any:
        """The value of a kept register after the end."""
        return self._values[register]

    def times(self) -> tuple[float, float]:
        """Seconds that the thread has computed and waited, over all iterations."""
        return self._busy_s, self._stall_s

    def record_spans(self, on: bool) -> None:
        """Lets the thread keep when it executes and when it waits, or stops that."""
        self._records = on

    def take_spans(self) -> list[tuple[float, float, bool]]:
        """Begin and end of each execution and wait, and whether it was a wait."""
        spans, self._spans = self._spans, []
        return spans

    # --- the thread ---

    def _run(self) -> None:
        self._start.wait()
        torch.set_num_threads(self._num_threads)
        began, stalled = time.perf_counter(), self._stall_s
        try:
            with torch._C.DisableTorchFunction(), BelowAutograd():
                self._execute()
        except Cancelled:
            pass
        except BaseException as e:
            self._error = e
        self._busy_s += time.perf_counter() - began - (self._stall_s - stalled)
        self._record(began, False)
        with self._condition:
            self._done.set()
            self._condition.notify_all()

    def _record(self, began: float, waited: bool) -> None:
        if self._records:
            self._spans.append((began, time.perf_counter(), waited))

    def _receive(self) -> Any:
        began = time.perf_counter()
        message = self._messages.get()
        self._stall_s += time.perf_counter() - began
        self._record(began, True)
        if self._cancelled:
            raise Cancelled
        return message

    def _execute(self) -> None:
        instructions = self._program.instructions
        values = self._values
        deferred: list[Call | Feed] = []
        position = 0
        while position < len(instructions):
            instruction = instructions[position]
            position += 1
            match instruction:
                case Call(when=When.NOW):
                    self._call(instruction)
                case Feed(when=When.NOW):
                    values[instruction.out] = self._receive()
                case Call() | Feed():
                    deferred.append(instruction)
                case Fetch():
                    value = values[instruction.source]
                    self._publish(instruction.slot, copied(value) if instruction.copy else value)
                case Move():
                    for out, source in zip(instruction.outs, instruction.sources, strict=True):
                        values[out] = values[source]
                case Switch():
                    position = instruction.targets[self._receive()]
                case Jump():
                    position = instruction.target
                case Compiled():
                    raise RuntimeError("compiled blocks need the native GraphRunner")
                case Commit():
                    self._check_deferred(deferred)
                    self._wait_for_commit()
                    self._committing = True
                    for late in sorted(deferred, key=lambda i: i.when):
                        if isinstance(late, Feed):
                            values[late.out] = self._receive()
                        else:
                            self._call(late)
            for register in instruction.release:
                values[register] = None
            if self._cancelled:
                raise Cancelled

    def _check_deferred(self, deferred: Sequence[Call | Feed]) -> None:
        """What is put off to the commit has its values: it must not fail half way."""
        defined: set[int] = set()
        for late in deferred:
            if late.when is When.COMMIT_LAST:
                continue
            if any(self._values[r] is None and r not in defined for r in reads(late)):
                where = describe(late.location)
                raise RuntimeError(f"a call (from {where}) would read a value of another path at the commit")
            defined.update(writes(late))

    def _publish(self, slot: int, value: Any) -> None:
        with self._condition:
            self._published[slot] = value
            self._condition.notify_all()

    def _wait_for_commit(self) -> None:
        began = time.perf_counter()
        with self._condition:
            while not (self._committed or self._cancelled):
                self._condition.wait()
        self._stall_s += time.perf_counter() - began
        self._record(began, True)
        if self._cancelled:
            raise Cancelled

    def _call(self, call: Call) -> None:
        if call.when is When.COMMIT_LAST and self._values[call.args[0].index] is None:
            return  # the tensor was not bound on this path
        try:
            torch.set_grad_enabled(call.grad_mode)
            positional, keywords = by_schema(call.target, map(self._resolve, call.args))
            returned = call.target(*positional, **keywords)
        except Exception as e:
            raise RuntimeError(
                f"{call.target} failed in the GraphRunner (from {describe(call.location)}): {e}"
            ) from e
        if not any(o is not None for o in call.outs):
            return
        for out, value, shape in zip(call.outs, flat(returned), call.shapes or call.outs, strict=True):
            if out is not None:
                if isinstance(shape, tuple) and tuple(value.shape) != tuple(map(self._size, shape)):
                    raise RuntimeError(
                        f"{call.target} (from {describe(call.location)}) gave shape {tuple(value.shape)} "
                        f"where traces had {shape}"
                    )
                self._values[out] = value

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, Reg):
            return self._values[argument.index]
        if isinstance(argument, tuple):
            return [self._resolve(a) for a in argument]
        return self._size(argument)

    def _size(self, argument: Any) -> Any:
        if not isinstance(argument, Size):
            return argument
        value = value_of(argument, self._wait_for_symbol)
        if value is None:
            raise RuntimeError("a size is none in this iteration")
        return value

    def _wait_for_symbol(self, symbol: int) -> int:
        began = time.perf_counter()
        with self._condition:
            while symbol not in self._symbols and not self._cancelled:
                self._condition.wait()
        self._stall_s += time.perf_counter() - began
        if self._cancelled:
            raise Cancelled
        return self._symbols[symbol]
