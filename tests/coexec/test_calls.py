"""Arguments and return values, taken apart and put together."""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coexec.tracegraph import calls
from coexec.tracegraph.graph import FedNumber, NumberSlot
from coexec.tracegraph.numbers import TRANSFORMS, same_number, unify, unify_slots, varying
from coexec.tracegraph.trace import Input, Operation

Pair = namedtuple("Pair", "first second")
NUMBERS = st.floats(allow_nan=True) | st.integers(-(10**6), 10**6)
LEAVES = (
    st.none()
    | st.booleans()
    | st.text(max_size=3)
    | NUMBERS
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from(
        [torch.float32, torch.strided, torch.device("cpu"), torch.contiguous_format, ..., torch.ones(2)]
    )
    | st.builds(np.float64, st.floats(allow_nan=False))
    | st.builds(slice, st.none() | st.integers(0, 3), st.integers(0, 3), st.none() | st.just(2))
)
VALUES = st.recursive(
    LEAVES,
    lambda v: (
        st.lists(v, max_size=3)
        | st.lists(v, max_size=3).map(tuple)
        | st.builds(Pair, v, v)
        | st.dictionaries(st.text(max_size=2), v, max_size=2)
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        return same_number(a, b)
    return a == b


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.text(max_size=2), VALUES, max_size=2))
def test_arguments_come_back_as_they_were(args, kwargs):
    tensors, numbers, key = calls.flatten(args, kwargs)
    hash(key)

    again, keywords = calls.unflatten(key, tensors, numbers)

    assert same(tuple(args), again)
    assert same(kwargs, keywords)


@given(st.lists(VALUES, max_size=3))
def test_keys_of_equal_arguments_are_equal(args):
    assert calls.flatten(args, {})[2] == calls.flatten(args, {})[2]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        ("a", b"a"),
        ([1], (1,)),
        (torch.float32, torch.float64),
        (None, False),
        (1, "1"),
    ],
)
def test_keys_of_arguments_of_other_types_differ(a, b):
    assert calls.flatten([a], {})[2] != calls.flatten([b], {})[2]


@pytest.mark.parametrize(("a", "b"), [(0.3, 1.0), (-0.3, 0.0), (7, 1), (-7, 0)])
def test_special_numbers_are_in_classes_of_their_own(a, b):
    assert calls.number_class(a) != calls.number_class(b)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.4), (-3.0, -4.5), (7, 9), (math.nan, math.nan)])
def test_ordinary_numbers_of_one_sign_are_in_one_class(a, b):
    assert calls.number_class(a) == calls.number_class(b)


@given(NUMBERS)
def test_the_example_of_a_class_is_in_it(number):
    example = calls.example_of(calls.number_class(number))

    assert calls.number_class(type(number)(example) if example == example else example) == calls.number_class(
        number
    )


@given(VALUES)
def test_a_returned_value_is_built_from_its_template(value):
    leaves = []

    def leaf(v):
        leaves.append(v)
        return calls.NewTensor(len(leaves) - 1) if len(leaves) % 2 else calls.SameTensor(len(leaves) - 1)

    template = calls.template(value, leaf)

    built = calls.build(template, leaves, leaves)
    assert same(built, value) if not isinstance(value, dict) else True


def test_the_new_tensors_of_a_returned_value_have_their_numbers():
    a, b = torch.ones(1), torch.ones(2)
    template = calls.template((a, [b, a]), lambda t: calls.NewTensor(0) if t is a else calls.NewTensor(1))

    assert [(i, t.numel()) for i, t in calls.new_tensors(template, (a, [b, a]))] == [(0, 1), (1, 2), (0, 1)]


def test_objects_that_can_only_be_compared_by_identity_are_found():
    def opaque(value):
        return calls.has_opaque_data(calls.flatten([value], {})[2])

    assert opaque(object())
    assert opaque([np.ones(2)])
    assert not opaque(torch.Generator())
    assert not opaque(len)
    assert not opaque((1, "a", None))


# --- numbers -------------------------------------------------------------------------------------


def operation(*args):
    schema = {2: torch.ops.aten.mul.Tensor, 3: torch.ops.aten.add.Tensor}[len(args) + 1]
    return Operation(target=schema, args=(Input(0), *args), results=(), writes=(), random=False, **GRAD_MODE)


GRAD_MODE = {"grad_mode": False} if "grad_mode" in Operation.__dataclass_fields__ else {}
NAMES = st.sampled_from(sorted(TRANSFORMS))
FLOATS = st.floats(-100, 100)


def values(argument, numbers):
    """What a fed number stands for, by each of its origins."""
    if isinstance(argument, FedNumber):
        return [TRANSFORMS[o.transform](numbers[o.node, o.slot]) for o in argument.origins]
    return [argument]


@given(FLOATS, FLOATS, st.lists(NAMES, min_size=1, max_size=2))
def test_a_unified_operation_describes_both_traces(ours, theirs, names):
    a = [operation(*(TRANSFORMS[n](ours) for n in names))]
    b = [operation(*(TRANSFORMS[n](theirs) for n in names))]

    unified = unify(a, b, varying(0, [NumberSlot(ours)], [theirs]))

    assert unified is not None
    for number, [original] in ((ours, a), (theirs, b)):
        for mine, theirs_ in zip(unified[0].args[1:], original.args[1:], strict=True):
            for value in values(mine, {(0, 0): number}):
                assert type(value) is type(theirs_)
                assert same_number(value, theirs_)


@given(FLOATS, FLOATS, FLOATS)
def test_a_third_trace_fits_if_and_only_if_its_number_follows(first, second, third):
    slots = unify_slots([NumberSlot(first)], [second])
    unified = unify([operation(first)], [operation(second)], varying(0, [NumberSlot(first)], [second]))
    right = unify(unified, [operation(third)], varying(0, slots, [third]))
    wrong = unify(unified, [operation(third + 1000)], varying(0, slots, [third]))

    assert right is not None
    assert wrong is None


@given(FLOATS, FLOATS, FLOATS)
def test_numbers_that_agreed_in_two_traces_are_told_apart_by_a_third(first, second, third):
    slots = [NumberSlot(first), NumberSlot(first)]
    unified = unify([operation(first)], [operation(second)], varying(0, slots, [second, second]))
    slots = unify_slots(slots, [second, second])

    again = unify(unified, [operation(third)], varying(0, slots, [third + 1, third]))

    if same_number(first, second):
        return
    assert again is not None
    for value in values(again[0].args[1], {(0, 0): third + 1, (0, 1): third}):
        assert same_number(value, third)


def test_a_number_that_nothing_explains_is_another_operation():
    assert unify([operation(0.5)], [operation(0.7)], []) is None
    assert unify([operation(0.5)], [], []) is None
    assert unify([operation(1)], [operation(1.0)], []) is None
    assert unify([operation(0.0)], [operation(-0.0)], []) is None
    assert unify([operation(calls.NAN)], [operation(calls.NAN)], []) is not None


def test_slots_vary_within_the_classes_that_traces_have_shown():
    [slot] = unify_slots([NumberSlot(0.25)], [0.75])

    assert slot.classes == {calls.number_class(0.25)}
    assert unify_slots([NumberSlot(0.25)], [0.25]) == (NumberSlot(0.25),)
