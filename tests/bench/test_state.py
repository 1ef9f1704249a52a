import math

import pytest
import torch

from bench.state import compare_states

VALUE = torch.tensor([1.0, 2.0, float("nan")])


def test_equal_bits_are_equal_nan_included():
    difference = compare_states({"x": VALUE}, {"x": VALUE.clone()}, None)

    assert difference.equal
    assert difference.max_abs == 0


def test_one_bit_is_a_difference_and_is_named():
    eager = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0 + 2**-23])}

    difference = compare_states(state, eager, None)

    assert not difference.equal
    assert difference.first == "b"
    assert difference.max_abs == pytest.approx(2**-23)


def test_a_negative_zero_is_not_a_zero():
    assert not compare_states({"x": torch.tensor(-0.0)}, {"x": torch.tensor(0.0)}, None).equal


def test_another_type_is_a_difference():
    state, eager = {"x": torch.tensor(1, dtype=torch.int32)}, {"x": torch.tensor(1, dtype=torch.int64)}

    assert not compare_states(state, eager, None).equal


@pytest.mark.parametrize("other", [{}, {"x": torch.zeros(2)}], ids=["missing", "another shape"])
def test_a_tensor_that_is_missing_or_has_another_shape_is_infinitely_far(other):
    difference = compare_states({"x": torch.zeros(3)}, other, 1e-3)

    assert not difference.equal
    assert difference.max_abs == math.inf


@pytest.mark.parametrize(("distance", "equal"), [(0.9e-3, True), (1.1e-3, False)])
def test_a_tolerance_is_a_share_of_the_norm(distance, equal):
    eager = torch.tensor([3.0, 4.0])
    state = eager + torch.tensor([0.0, 5 * distance])

    assert compare_states({"x": state}, {"x": eager}, 1e-3).equal is equal


def test_nan_where_eager_has_a_number_is_never_within_a_tolerance():
    difference = compare_states({"x": VALUE}, {"x": torch.ones(3)}, 1e9)

    assert not difference.equal
    assert difference.max_abs == math.inf
