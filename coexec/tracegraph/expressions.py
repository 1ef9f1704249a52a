"""Finds expressions for sizes that vary.

In:  numbers that several traces of the same events have in the same places.
Out: for each place a number, or a `Size`: an expression in symbols.

What PyTorch's own code does to sizes on their way to the kernels is multiplication (contiguous strides,
flattening), addition (padding, concatenation) and division (convolutions with strides, chunks).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from coexec.tracegraph.sizes import Size, number_of, symbol

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
