"""What operations return for tensors of a geometry, against what they return for such tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coexec.runners import bare
from coexec.runners.bare import Bare, elementwise, returned

aten = torch.ops.aten


def tensor_like(one):
    contiguous = torch.ones(one.shape, dtype=one.dtype)
    if contiguous.stride() == one.stride:
        return contiguous
    return torch.ones(one.shape[::-1], dtype=one.dtype).t()


@st.composite
def arguments(draw):
    """An elementwise operation and arguments of one shape or several, contiguous or transposed."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    target, count = draw(
        st.sampled_from(
            [(aten.mul.Tensor, 2), (aten.tanh.default, 1), (aten.where.self, 3), (aten.eq.Tensor, 2)]
        )
    )
    made = []
    for number in range(count):
        own = tuple(1 if draw(st.integers(0, 5)) == 0 else n for n in shape)
        dtype = torch.bool if target is aten.where.self and number == 0 else torch.float32
        transposed = len(own) == 2 and draw(st.booleans())
        tensor = torch.ones(own[::-1], dtype=dtype).t() if transposed else torch.ones(own, dtype=dtype)
        made.append(Bare.of(tensor))
    return target, made


@settings(deadline=None, max_examples=200)
@given(arguments())
def test_the_geometry_of_an_elementwise_result_is_eagers(case):
    target, made = case
    expected = target(*map(tensor_like, made))
    found = elementwise(target, made, expected.dtype)
    if found is not None:
        assert found == Bare.of(expected)
    (tried,) = returned(target, made)
    assert tried.shape == tuple(expected.shape)


def test_what_is_no_elementwise_operation_of_one_shape_is_tried():
    two, one = Bare.of(torch.ones(2, 3)), Bare.of(torch.ones(3))
    assert elementwise(aten.mm.default, [two, two], torch.float32) is None
    assert elementwise(aten.add.Tensor, [two, one, 1], torch.float32) is None
    assert elementwise(aten.add.Tensor, [Bare.of(torch.ones(3, 2).t()), two, 1], torch.float32) is None
    assert elementwise(aten.add.Tensor, [two, two, 1], torch.float32) == two


def test_numbers_that_are_equal_but_of_other_types_are_other_arguments():
    whole = Bare.of(torch.ones(2, dtype=torch.int64))
    assert [returned(aten.mul.Scalar, [whole, n])[0].dtype for n in (2, 2.0, True, 1, 1.0)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
        torch.float32,
    ]


def test_a_question_is_answered_once_and_an_error_is_raised_each_time(monkeypatch):
    asked = Bare.of(torch.ones(7, 11))
    first = returned(aten.sum.dim_IntList, [asked, (1,), False, None])
    monkeypatch.setattr(bare, "_tried", lambda *_: pytest.fail("it was answered before"))
    assert returned(aten.sum.dim_IntList, [asked, (1,), False, None]) == first
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            returned(aten.mm.default, [asked, asked])
