"""Sizes that vary in compiled blocks.

In:  instructions whose sizes are expressions in symbols.
Out: nodes that compute them from what a library is handed over: for each symbol a tensor that has as many
     elements, since a library takes tensors only.

A library begins when all of its symbols are known. Python tells what a symbol is when it first meets it, and
may wait for a value before; so a block is parted before a symbol that is first used behind a fetch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from coexec.executors.job import Unsupported
from coexec.tracegraph.instructions import reads
from coexec.tracegraph.program import Call, Feed, Fetch, Instruction, Program
from coexec.tracegraph.sizes import Size, symbols_in
from coexec.tracegraph.trace import Dimension, TensorMeta


class SizeNodes:
    """The nodes of a block that compute its sizes."""

    def __init__(self, graph: Graph, symbols: Sequence[int]) -> None:
        self._graph = graph
        self._carriers = {s: graph.placeholder(f"s{index}") for index, s in enumerate(symbols)}
        self._made: dict[Any, Any] = {}

    def __call__(self, size: Dimension) -> Any:
        """A number, or the node that computes a size."""
        if not isinstance(size, Size):
            return size
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]

    def geometry(self, shape: Sequence[Dimension], stride: Sequence[Dimension]) -> tuple[list[Any], bool]:
        """A tensor's geometry as the native operators take it, and whether it varies."""
        numbers = [len(shape), *map(self, shape), *map(self, stride)]
        return numbers, any(isinstance(n, Node) for n in numbers)

    def _symbol(self, symbol: int) -> Any:
        if symbol not in self._made:
            carrier = self._carriers[symbol]
            self._made[symbol] = self._graph.call_function(torch.ops.aten.sym_size.int, (carrier, 0))
        return self._made[symbol]

    def _make(self, size: Size) -> Any:
        if size.exact:
            raise Unsupported(f"the size {size}, which has no value for some")
        total: Any = None
        for coefficient, factors in size.terms:
            product: Any = None
            for factor in factors:
                product = self._with(operator.mul, product, self._factor(factor))
            if coefficient != 1:
                product = self._with(operator.mul, product, coefficient)
            total = self._with(operator.add, total, product)
        if size.constant:
            total = self._with(operator.add, total, size.constant)
        return total if size.divisor == 1 else self._with(operator.floordiv, total, size.divisor)

    def _factor(self, factor: Any) -> Any:
        return self._symbol(factor) if isinstance(factor, int) else self(factor)

    def _with(self, operation: Any, left: Any, right: Any) -> Any:
        return right if left is None else self._graph.call_function(operation, (left, right))


def symbols_of(body: Iterable[Instruction], program: Program) -> tuple[int, ...]:
    """The symbols in the sizes of a block, in order."""
    return tuple(sorted({s for instruction in body for s in _symbols(instruction, program)}))


def before_late_symbols(body: list[Instruction], program: Program) -> list[list[Instruction]]:
    """Parts a block before each symbol that is first used behind a fetch."""
    parts: list[list[Instruction]] = [[]]
    known: set[int] = set()
    fetched = False
    for instruction in body:
        symbols = _symbols(instruction, program)
        if fetched and not symbols <= known:
            parts.append([])
            fetched = False
        known |= symbols
        fetched = fetched or isinstance(instruction, Fetch)
        parts[-1].append(instruction)
    return parts


def _symbols(instruction: Instruction, program: Program) -> set[int]:
    metas = [program.metas[r] for r in reads(instruction) if r in program.metas]
    found: set[int] = set()
    if isinstance(instruction, Call):
        found |= symbols_in(instruction.args)
    if isinstance(instruction, Feed) and isinstance(instruction.example, TensorMeta):
        metas.append(instruction.example)
    for meta in metas:
        found |= symbols_in((*meta.shape, *meta.stride))
    return found
