"""What the PythonRunner knows of the iteration that is running.

In:  events as they are matched.
Out: records to replay, placeholders, external tensors; nothing here waits or computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from coexec.runners.placeholder import Symbol
from coexec.runners.records import EventRecord, FlagRecord, GradRecord, Token
from coexec.tracegraph.exposed import Exposure
from coexec.tracegraph.graph import START, Captured, Fed, Node, NodeBinding
from coexec.tracegraph.trace import Number, Produced


class Mismatch(Exception):
    """The running iteration left the TraceGraph; carries reason id and detail."""

    def __init__(self, id_: str, detail: str) -> None:
        super().__init__(detail)
        self.id = id_
        self.detail = detail


@dataclass(slots=True)
class Iteration:
    """What the PythonRunner knows of the iteration that is running."""

    at: int = START
    path: list[int] = field(default_factory=list)  # steps, see `graph.step_of`
    records: list[EventRecord | GradRecord | FlagRecord] = field(default_factory=list)
    symbols: dict[int, Symbol] = field(default_factory=dict)  # by id of the placeholder
    placeholders: dict[tuple[int, int], Symbol] = field(default_factory=dict)  # by event and output
    captured: list[torch.Tensor | None] = field(default_factory=list)
    externals: dict[int, Captured | Fed] = field(default_factory=dict)  # by id of the object
    fed: dict[Fed, torch.Tensor] = field(default_factory=dict)
    late: list[torch.Tensor | Number] = field(default_factory=list)  # messages for the commit
    grads: dict[int, tuple[Token, Token]] = field(default_factory=dict)  # by id of the leaf
    exposed: list[Exposure] = field(default_factory=list)
    checked: int = -1  # fed tensors when memory was last compared
    inputs: dict[int, Exposure] = field(default_factory=dict)  # by id, on memory that NumPy may know
    alive: list[Produced] = field(default_factory=list)  # held by the program at the end
    freed: set[int] = field(default_factory=set)  # nodes that backward passes in pieces went through
    pieces: dict[int, list[tuple[Node, Sequence[Token]]]] = field(default_factory=dict)  # by where they begin
    location: int = -1
    _numbers: dict[int, Sequence[Number]] = field(default_factory=dict)  # of the first `_counted` records
    _counted: int = 0

    def numbers(self) -> dict[int, Sequence[Number]]:
        """The numbers of each node so far."""
        for record in itertools.islice(self.records, self._counted, None):
            if isinstance(record, EventRecord):
                self._numbers[record.node.id] = record.numbers
        self._counted = len(self.records)
        return self._numbers

    def symbol_of(self, binding: Produced) -> Symbol:
        """The placeholder that an output of an event is in this iteration."""
        return self.placeholders[binding.event, binding.output]

    def object_of(self, binding: NodeBinding) -> torch.Tensor | None:
        """The tensor object that a binding means in this iteration."""
        if isinstance(binding, Captured):
            return self.captured[binding.index]
        if isinstance(binding, Fed):
            return self.fed.get(binding)
        symbol = None if binding is None else self.placeholders.get((binding.event, binding.output))
        return None if symbol is None else symbol.tensor

    def token_of(self, tensor: torch.Tensor) -> Token:
        """What a record holds in place of a tensor: placeholders by their binding."""
        symbol = self.symbols.get(id(tensor))
        return tensor if symbol is None else symbol.binding
