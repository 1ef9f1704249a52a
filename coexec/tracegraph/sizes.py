"""Sizes that vary from iteration to iteration, as expressions.

In:  an expression and the values of its symbols, which an iteration shows when a tensor from outside, or a
     number, is first used.
Out: the size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """The expression `(sum of coefficient * product of factors + constant) // divisor`.

    Attributes:
        terms: coefficients and factors; a factor that is an int is the number of a symbol.
        constant: what is added to the terms.
        divisor: what the sum is divided by, rounded down; with `exact` there must be no remainder.
    """

    terms: tuple[tuple[int, tuple[Any, ...]], ...]
    constant: int = 0
    divisor: int = 1
    exact: bool = False

    def __str__(self) -> str:
        text = " + ".join(_term(c, factors) for c, factors in self.terms).replace("+ -", "- ")
        if self.constant:
            text += f" {'-' if self.constant < 0 else '+'} {abs(self.constant)}"
        return text if self.divisor == 1 else f"({text})//{self.divisor}"

    __repr__ = __str__


def _term(coefficient: int, factors: tuple[Any, ...]) -> str:
    parts = [f"s{f}" if isinstance(f, int) else f"({f})" for f in factors]
    if coefficient not in (1, -1):
        parts.insert(0, str(abs(coefficient)))
    return ("-" if coefficient < 0 else "") + "*".join(parts)


@dataclass(frozen=True, slots=True)
class Symbol:
    """The values that one symbol may have: those near the values of the traces."""

    low: int
    high: int

    def admits(self, value: int) -> bool:
        """Whether an iteration may have this value."""
        return self.low <= value <= self.high


@cache
def symbol(number: int) -> Size:
    """The expression that is a symbol."""
    return Size(((1, (number,)),))


def number_of(size: Size) -> int | None:
    """The number of the symbol that an expression is; None if it is none."""
    if size.constant or size.divisor != 1 or len(size.terms) != 1:
        return None
    (coefficient, factors) = size.terms[0]
    bare = coefficient == 1 and len(factors) == 1 and isinstance(factors[0], int)
    return factors[0] if bare else None


def value_of(size: Size | int, symbols: Callable[[int], int | None]) -> int | None:
    """The value of an expression; None if a symbol in it has none yet, or an exact division is none."""
    if not isinstance(size, Size):
        return size
    total = size.constant
    for coefficient, factors in size.terms:
        product = coefficient
        for factor in factors:
            value = symbols(factor) if isinstance(factor, int) else value_of(factor, symbols)
            if value is None:
                return None
            product *= value
        total += product
    if size.exact and total % size.divisor:
        return None
    return total // size.divisor


def symbols_in(value: Any) -> set[int]:
    """The numbers of the symbols in an expression, or in several."""
    if isinstance(value, tuple):
        return set().union(*map(symbols_in, value))
    if not isinstance(value, Size):
        return set()
    factors = [f for _, factors in value.terms for f in factors]
    inner = [symbols_in(f) for f in factors if isinstance(f, Size)]
    return {f for f in factors if isinstance(f, int)}.union(*inner)


def renumbered(size: Size | int, numbers: Mapping[int, int]) -> Size | int:
    """An expression in which symbols have other numbers."""
    if not isinstance(size, Size):
        return size
    terms = tuple(
        (c, tuple(numbers[f] if isinstance(f, int) else renumbered(f, numbers) for f in factors))
        for c, factors in size.terms
    )
    return Size(terms, size.constant, size.divisor, size.exact)


def substituted(size: Size | int, values: Mapping[int, Size | int]) -> Size | int:
    """An expression with others in the place of some of its symbols; sums of the same factors become one."""
    if not isinstance(size, Size):
        return size
    total, constant = Counter[tuple[Any, ...]](), size.constant
    for coefficient, factors in size.terms:
        for product, factor in _product(factors, values):
            if product:
                total[product] += coefficient * factor
            else:
                constant += coefficient * factor
    terms = tuple([(c, factors) for factors, c in sorted(total.items(), key=repr) if c])
    made = Size(terms, constant, size.divisor, size.exact)
    if not terms:
        value = value_of(made, lambda _: None)
        return made if value is None else value
    inner = terms[0][1][0]
    is_inner = (terms, constant, size.divisor) == (((1, (inner,)),), 0, 1) and isinstance(inner, Size)
    return inner if is_inner else made


def _product(factors: tuple[Any, ...], values: Mapping[int, Size | int]) -> list[tuple[tuple[Any, ...], int]]:
    """A product as a sum of products of symbols and quotients, with their coefficients."""
    sums: list[tuple[tuple[Any, ...], int]] = [((), 1)]
    for factor in factors:
        value = values.get(factor, symbol(factor)) if isinstance(factor, int) else substituted(factor, values)
        if not isinstance(value, Size):
            summands: list[tuple[tuple[Any, ...], int]] = [((), value)]
        elif value.divisor != 1 or value.exact:
            summands = [((value,), 1)]
        else:
            summands = [(f, c) for c, f in value.terms] + [((), value.constant)]
        sums = [(tuple(sorted((*a, *b), key=repr)), c * d) for a, c in sums for b, d in summands if c * d]
    return sums


def fixed(sizes: Iterable[Size | int]) -> tuple[int, ...]:
    """Sizes of which none varies."""
    numbers = []
    for size in sizes:
        assert not isinstance(size, Size), f"{size} varies"
        numbers.append(size)
    return tuple(numbers)


def varies(value: Any) -> bool:
    """Whether an argument holds a size that varies."""
    return isinstance(value, Size) or (isinstance(value, tuple) and any(map(varies, value)))


def value_range(values: Sequence[int]) -> Symbol:
    """What a symbol may be in iterations to come, by its values in traces.

    Code below Python may do something else from some size on, so sizes far from those seen are traced first.
    So are zero and one unless a trace had them: PyTorch treats these by their own rules, as it does -1.
    """
    smallest, largest = min(values), max(values)
    if largest < 0:
        return Symbol(2 * smallest, largest)
    if smallest < 0:
        return Symbol(0, -1)  # nothing: what a sign does is no matter of sizes
    return Symbol(smallest if smallest < 2 else max(2, -(-smallest // 2)), 2 * largest)
