"""Runs the symbolic graph of a program by itself, to measure it.

In:  a program in the co-execution phase.
Out: executions of its graph on stand-ins for what Python would send, and on copies of the captured
     tensors, so that nothing of the program changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from coexec.errors import TapeError
from coexec.programs import all_states
from coexec.runners import random_state
from coexec.runners.graph_runner import make_graph_runner
from coexec.tracegraph.copies import copied
from coexec.tracegraph.program import Feed, Jump, Program, Switch, When
from coexec.tracegraph.sizes import value_of
from coexec.tracegraph.trace import TensorMeta


class Replay:
    """The graph of a program, on a GraphRunner of its own.

    Args:
        key: the program's key, as `coexec.explain()` shows it.

    Raises:
        TapeError: if there is no such program, or it is not in the co-execution phase.
    """

    def __init__(self, key: str) -> None:
        state = next((s for s in all_states() if s.key == key), None)
        found = None if state is None or state.skeleton is None else state.find_captured()
        if state is None or state.skeleton is None or found is None:
            raise TapeError(f"no program {key!r} in the co-execution phase")
        self._skeleton = state.skeleton
        self._runner = make_graph_runner()
        self._symbols = {i: s.high // 2 for i, s in enumerate(self._skeleton.graph.symbols)}
        self._messages = list(_messages(self._skeleton.program, self._symbols.get))
        with torch.no_grad():
            self._captured = [copied(t) for t in found.bound]

    def start(self) -> None:
        """Begins one execution, with everything that Python would send, and returns at once."""
        self._restore = random_state.save(self._skeleton.generators)
        self._before = self._runner.times()[0]
        self._runner.begin(self._skeleton.program, self._captured, False)
        for symbol, value in self._symbols.items():
            self._runner.bind(symbol, value)
        for message in self._messages:
            self._runner.send(message)
        self._runner.commit()

    def wait(self) -> float:
        """Waits for its end.

        Returns:
            Milliseconds that the GraphRunner computed.
        """
        self._runner.wait()
        self._runner.finish()
        self._restore()
        return (self._runner.times()[0] - self._before) * 1e3


def _messages(program: Program, symbols: Callable[[int], int | None]) -> Iterator[Any]:
    """What Python would send on the path that takes the first case of every switch."""
    late = []
    position = 0
    instructions = program.sent_to
    while position < len(instructions):
        instruction = instructions[position]
        position += 1
        match instruction:
            case Feed(when=When.NOW):
                yield _stand_in(instruction.example, symbols)
            case Feed():
                late.append(_stand_in(instruction.example, symbols))
            case Switch():
                yield 0
                position = instruction.targets[0]
            case Jump():
                position = instruction.target
    yield from late


def _stand_in(example: Any, symbols: Callable[[int], int | None]) -> Any:
    if not isinstance(example, TensorMeta):
        return example
    size, stride = ([value_of(s, symbols) or 0 for s in sizes] for sizes in (example.shape, example.stride))
    return torch.empty_strided(size, stride, dtype=example.dtype, device=example.device).zero_()
