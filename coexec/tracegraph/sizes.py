"""Sizes that vary from iteration to iteration, as expressions.

In:  numbers that several traces of the same events have in the same places.
Out: for each place a number, or a `Size`: an expression in symbols, whose values an iteration shows when
     a tensor from outside, or a number, is first used.

A symbol is a dimension of a tensor from outside of the iteration, or a number that Python passed. What
PyTorch's own code does to sizes on their way to the kernels is multiplication (contiguous strides,
flattening), addition (padding, concatenation) and division (convolutions with strides, chunks).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


# --- finding expressions ------------------------------------------------------------------------

Values = tuple[int, ...]  # of one place, in each trace

#: Sizes of which products of any three are tried.
_MANY = 10
#: Divisors of convolutions' and poolings' strides, of chunks and splits.
_DIVISORS = (2, 3, 4, 5, 6, 8, 16, 32)


class Expressions:
    """Expressions for the places of traces, found one after another in the order of the program.

    What has been found explains later places, so that a size may go through several layers.
    """

    def __init__(self) -> None:
        self._found: dict[Values, Size] = {}
        self._symbols: list[tuple[int, Values]] = []
        self._hopeless: set[Values] = set()

    def add_symbol(self, number: int, values: Values) -> Size:
        """Makes values a symbol."""
        self._symbols.append((number, values))
        self._hopeless.clear()
        return self._found.setdefault(values, symbol(number))

    def find(self, values: Values) -> Size | int | None:
        """The simplest expression that has these values in the traces; None if there is none."""
        if len(set(values)) == 1:
            return values[0]
        if values in self._hopeless:
            return None
        if values not in self._found:
            found = self._multiple(values) or self._sum(values) or self._affine(values)
            if found is None:
                self._hopeless.add(values)
                return None
            self._found[values] = found
        return self._found[values]

    def is_multiple(self, values: Values) -> bool:
        """Whether values are a multiple of what is known: what a tensor from outside may have by design."""
        return values in self._found or self._multiple(values, degree=1) is not None

    def _products(self, degree: int) -> list[tuple[tuple[Any, ...], Values]]:
        derived = [(s, v) for v, s in self._found.items() if s.constant or s.divisor != 1 or len(s.terms) > 1]
        bases: list[tuple[Any, Values]] = [*self._symbols, *derived]
        if len(bases) > _MANY:
            degree, bases = min(degree, 2), bases[:_MANY] + bases[-_MANY:]
        out = []
        for n in range(1, degree + 1):
            for chosen in itertools.combinations_with_replacement(bases, n):
                factors = tuple(f for f, _ in chosen)
                out.append((factors, tuple(math.prod(c) for c in zip(*(v for _, v in chosen), strict=True))))
        return out

    def _multiple(self, values: Values, degree: int = 3) -> Size | None:
        for factors, products in self._products(degree):
            pairs = [
                (v, p) for v, p in zip(values, products, strict=True) if v or p
            ]  # zero is any multiple of zero
            ratios = {v // p if p and v % p == 0 else None for v, p in pairs}
            if len(ratios) == 1 and None not in ratios:
                return Size(((ratios.pop() or 1, factors),))
        return None

    def _sum(self, values: Values) -> Size | None:
        """The sum or difference of two sizes that are known."""
        for (a, left), (b, right) in itertools.permutations(list(self._found.items()), 2):
            if all(v == x + y for v, x, y in zip(values, a, b, strict=True)):
                return Size(((1, (_factor(left),)), (1, (_factor(right),))))
            if all(v == x - y for v, x, y in zip(values, a, b, strict=True)):
                return Size(((1, (_factor(left),)), (-1, (_factor(right),))))
        return None

    def _affine(self, values: Values) -> Size | None:
        known = [((_factor(s),), v) for v, s in self._found.items()]
        candidates = [*self._products(2), *known]
        for factors, products in candidates:
            shifts = {v - p for v, p in zip(values, products, strict=True)}
            if len(shifts) == 1:
                return Size(((1, factors),), shifts.pop())
        for factors, products in candidates:
            found = _line(factors, products, values)
            if found is not None:
                return found
        if len(set(values)) < 2:
            return None
        for factors, products in candidates:
            found = _quotient(factors, products, values)
            if found is not None:
                return found
        return None


def _factor(size: Size) -> Any:
    number = number_of(size)
    return size if number is None else number


def _line(factors: tuple[Any, ...], products: Values, values: Values) -> Size | None:
    """An integer slope and a constant that three different points agree on."""
    points = sorted(set(zip(products, values, strict=True)))
    if len({p for p, _ in points}) < 3 or len({p for p, _ in points}) != len(points):
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope, rest = divmod(y1 - y0, x1 - x0)
    if rest or any(y - y0 != slope * (x - x0) for x, y in points):
        return None
    return Size(((slope, factors),), y0 - slope * x0)


def _quotient(factors: tuple[Any, ...], products: Values, values: Values) -> Size | None:
    pairs = list(zip(products, values, strict=True))
    for divisor in _DIVISORS:
        if all(p == v * divisor for p, v in pairs):
            return Size(((1, factors),), 0, divisor, exact=True)
    if len(set(pairs)) < 3:
        return None
    for divisor in _DIVISORS:
        for constant in range(-divisor, 2 * divisor):
            if all((p + constant) // divisor == v for p, v in pairs):
                return Size(((1, factors),), constant, divisor)
    return None


def value_range(values: Sequence[int]) -> Symbol:
    """What a symbol may be in iterations to come, by its values in traces.

    Code below Python may do something else from some size on, so sizes far from those seen are traced
    first. So are zero and one unless a trace had them: PyTorch treats these by their own rules.
    """
    smallest = min(values)
    return Symbol(smallest if smallest < 2 else max(2, -(-smallest // 2)), 2 * max(values))
