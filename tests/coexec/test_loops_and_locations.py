"""Where an event happens: call sites, lines and loops."""

from __future__ import annotations

import dis
import sys
from types import FunctionType

import pytest

from coexec import location
from coexec.tracegraph.loops import enclosing, loops_around, loops_of


def mark():
    """Calls of this function are looked for in bytecode."""


def nested(n):
    mark()  # 0 loops
    for _ in range(n):
        mark()  # 1 loop
        while n:
            mark()  # 2 loops
            n -= 1
        else:
            mark()  # 1 loop
        for _ in ():
            continue
        mark()  # 1 loop
    mark()  # 0 loops
    while True:
        if n:
            mark()  # 1 loop
            continue
        break


def instructions_of_marks(code):
    found = []
    names = [i for i in dis.get_instructions(code) if i.argval == "mark" and "LOAD" in i.opname]
    for load in names:
        line = location.line_of(code, load.offset)
        found.append((line - code.co_firstlineno, load.offset))
    return found


def test_an_instruction_is_in_the_loops_that_the_source_shows():
    depths = [len(enclosing(nested.__code__, offset)) for _, offset in instructions_of_marks(nested.__code__)]

    assert depths == [0, 1, 2, 1, 1, 0, 1]


def test_loops_are_told_apart_and_know_their_lines():
    loops = loops_of(nested.__code__)

    assert len({(loop.first, loop.last) for loop in loops}) == len(loops)
    first = nested.__code__.co_firstlineno
    assert first + 2 in {loop.line for loop in loops}
    assert str(loops[0]).startswith("nested:")


def test_a_function_without_loops_has_none():
    assert loops_of(mark.__code__) == ()


def test_loops_around_the_entry_of_a_tape_are_not_in_the_iteration():
    offsets = [offset for _, offset in instructions_of_marks(nested.__code__)]
    outer, inner = offsets[1], offsets[2]

    assert len(loops_around([(nested.__code__, inner)], None)) == 2
    assert len(loops_around([(nested.__code__, inner)], (nested.__code__, outer))) == 1
    assert loops_around([(nested.__code__, outer)], (nested.__code__, outer)) == ()


def test_loops_of_callers_come_before_those_of_the_called():
    def inner():
        for _ in range(1):
            mark()

    outer_site = (nested.__code__, instructions_of_marks(nested.__code__)[1][1])
    inner_site = (inner.__code__, instructions_of_marks(inner.__code__)[0][1])

    assert [loop.code for loop in loops_around([outer_site, inner_site], None)] == [
        nested.__code__,
        inner.__code__,
    ]


# --- locations -----------------------------------------------------------------------------------


def both(skip, outermost):
    """The location by both implementations, of one call site."""
    sites = []
    for locate, sites_of in (
        (location.locate, location.sites),
        (location.locate_reference, location._sites_reference),
    ):
        sites.append(sites_of(locate(skip, outermost)))
    return sites


@pytest.mark.skipif(location.core is None, reason="the native module was not built")
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_the_native_location_and_its_reference_name_the_same_sites(depth):
    frame = sys._getframe()

    def descend(n):
        return descend(n - 1) if n else both(1, frame)

    native, reference = descend(depth)

    assert [code for code, _ in native] == [code for code, _ in reference]
    assert native == reference
    assert native[-1][0] is frame.f_code


def test_one_place_is_one_number_and_two_places_are_two():
    frame = sys._getframe()

    def here():
        return location.locate(0, frame)

    def there():
        return location.locate(0, frame)

    numbers = [here() for _ in range(3)]

    assert len(set(numbers)) == 1
    assert there() != numbers[0]
    assert here() != numbers[0], "the same function called from another place"


def test_a_location_is_described_by_the_users_line():
    frame = sys._getframe()
    number = location.locate(0, frame)

    assert location.describe(number) == f"{__file__.rsplit('/', 1)[-1]}:{frame.f_lineno - 2}"
    assert location.describe(-1) == "an unknown place"


def places(locate, n):
    """Where a method of C, called in one place, is called from, again and again."""
    found, frame = [], sys._getframe()

    class Key:
        def __hash__(self):
            found.append(locate(1, frame))
            return 0

    seen, key = set(), Key()
    for _ in range(n):
        seen.add(key)
    return found


@pytest.mark.parametrize("locate", {location.locate, location.locate_reference}, ids=lambda f: f.__name__)
def test_a_call_is_where_it_was_when_python_has_specialized_it(locate):
    cold = FunctionType(places.__code__.replace(), globals())  # nothing of it is specialized

    found = cold(locate, 100)

    assert len(found) == 100
    assert len(set(found)) == 1
