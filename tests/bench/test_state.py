import math

import pytest
import torch

from bench.modes import start_run
from bench.programs import PROGRAMS
from bench.state import compare_states, nudge

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


NUDGED = [
    {"x": torch.tensor([1.0, 1.1]), "losses": torch.tensor([1.0, 1.0, 1.01], dtype=torch.float64)},
    {"x": torch.ones(2), "losses": torch.tensor([1.0, 1.0, 0.9], dtype=torch.float64)},
]
EAGER = {"x": torch.ones(2), "losses": torch.ones(3, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"x": torch.tensor([1.3, 1.0])}, None),
        ({"x": torch.tensor([1.5, 1.0])}, "x"),
        ({"x": torch.tensor([math.nan, 1.0])}, "x"),
        ({"losses": torch.tensor([1.0, 1.0, 1.3], dtype=torch.float64)}, None),
        ({"losses": torch.tensor([1.0, 1.01, 1.0], dtype=torch.float64)}, "losses"),
        ({"y": torch.ones(1)}, "y"),
    ],
    ids=["near", "far", "no number", "late", "early", "of one run only"],
)
def test_a_run_may_be_about_as_far_from_eager_as_the_farthest_nudged_one(change, first):
    state = {**{name: value.clone() for name, value in EAGER.items()}, **change}

    assert compare_states(state, EAGER, 1e-3, NUDGED).first == first
    assert not compare_states(state, EAGER, None, NUDGED).equal


def test_a_nudge_moves_each_number_by_one_unit_in_the_last_place_and_each_nudge_in_other_directions():
    runs = [start_run(PROGRAMS["digits"], "eager", seed=0, preset="tiny") for _ in range(4)]
    for number, run in enumerate(runs[1:]):
        nudge(run, number)
    before, *after = [[p.detach() for p in run.training.model.parameters()] for run in runs]
    higher, lower = (
        [torch.nextafter(p, torch.full_like(p, to)) for p in before] for to in (math.inf, -math.inf)
    )

    assert all(map(torch.equal, after[0], higher))
    for moved in after[1:]:
        assert all(((m == h) | (m == b)).all() for m, h, b in zip(moved, higher, lower, strict=True))
    assert not all(map(torch.equal, after[1], after[2]))
