"""Sizes that vary, in the iteration that is running.

In:  what a node says of sizes, and what a call's tensors and numbers have.
Out: whether they agree, and the values of symbols that this call is the first to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coexec.runners.graph_runner import GraphRunner
from coexec.tracegraph.graph import NumberSlot
from coexec.tracegraph.sizes import Size, Symbol, number_of, value_of
from coexec.tracegraph.trace import Dimension, Number, TensorMeta


class Sizes:
    """The symbols of an iteration, as one call sees them; `keep` when the call has been matched."""

    def __init__(self, graph_runner: GraphRunner, symbols: Sequence[Symbol]) -> None:
        self._graph_runner = graph_runner
        self._symbols = symbols
        self._new: dict[int, int] = {}
        self.refused: str | None = None  # a size that no trace was near to

    def keep(self) -> None:
        """Tells the GraphRunner what symbols are."""
        for symbol, value in self._new.items():
            self._graph_runner.bind(symbol, value)

    def fit(self, expected: TensorMeta, given: TensorMeta) -> bool:
        """Whether a tensor has the metadata that a node expects."""
        if expected == given:
            return True
        if given.is_symbolic:  # of a placeholder
            known = self.concrete(given)
            if known is None:
                return False
            given = known
        if not expected.is_symbolic or len(expected.shape) != len(given.shape):
            return expected == given
        if replace(expected, shape=given.shape, stride=given.stride) != given:
            return False
        pairs = zip((*expected.shape, *expected.stride), (*given.shape, *given.stride), strict=True)
        return all(isinstance(g, int) and self._fits(e, g) for e, g in pairs)

    def sizes_fit(self, expected: Sequence[Dimension], given: Sequence[int]) -> bool:
        """Whether sizes that the GraphRunner has told are those that a node expects."""
        return all(map(self._fits, expected, given))

    def numbers_fit(self, slots: Sequence[NumberSlot], numbers: Sequence[Number]) -> bool:
        """Whether the numbers of a call have the values that expressions in sizes say."""
        return all(
            number.__class__ is int and self._fits(slot.value, number)
            for slot, number in zip(slots, numbers, strict=True)
            if isinstance(slot.value, Size)
        )

    def concrete(self, meta: TensorMeta) -> TensorMeta | None:
        """Metadata with the sizes of this iteration; None if one of them has no value."""
        if not meta.is_symbolic:
            return meta
        values = [value_of(s, self.value) for s in (*meta.shape, *meta.stride, meta.offset)]
        if any(v is None for v in values):
            return None
        known: Any = values
        rank = len(meta.shape)
        return replace(meta, shape=tuple(known[:rank]), stride=tuple(known[rank:-1]), offset=known[-1])

    def _fits(self, size: Any, value: Any) -> bool:
        symbol = number_of(size) if isinstance(size, Size) else None
        if symbol is not None and self.value(symbol) is None:
            allowed = self._symbols[symbol]
            if not allowed.admits(value):
                self.refused = f"a size of {value}; the traces are good for {allowed.low} to {allowed.high}"
                return False
            self._new[symbol] = value
            return True
        expected = value_of(size, self.value)
        if expected == value:
            return True
        self.refused = f"a size of {value} where it would be {'none' if expected is None else expected}"
        return False

    def value(self, symbol: int) -> int | None:
        """What a symbol is, if it is known."""
        new = self._new.get(symbol)
        return self._graph_runner.bound(symbol) if new is None else new


def encoded(size: Dimension | Number) -> Any:
    """A size as the native code reads it."""
    if not isinstance(size, Size):
        return size
    number = number_of(size)
    if number is not None:
        return (number,)
    terms = [(c, [(f,) if isinstance(f, int) else encoded(f) for f in factors]) for c, factors in size.terms]
    return (size.constant, size.divisor, size.exact, terms)
