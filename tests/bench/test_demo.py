import math

import pytest

from bench.commands.demo import verdict
from bench.state import Difference

EQUAL = Difference(True, 0.0, None)


def test_the_verdict_states_accuracy_and_equality():
    text = verdict(0.985, EQUAL, None)

    assert "test accuracy 98.50%\n" in text
    assert "co-execution equalled eager bit for bit" in text


def test_the_verdict_says_when_the_accuracy_is_too_low():
    assert "below the 97% that it should reach" in verdict(0.9699, EQUAL, None)


@pytest.mark.parametrize("max_abs", [0.5, math.inf])
def test_the_verdict_names_what_differs(max_abs):
    text = verdict(0.985, Difference(False, max_abs, "parameter output.weight"), None)

    assert "did NOT equal eager bit for bit: parameter output.weight differs" in text


def test_the_verdict_states_a_tolerance():
    assert "within a relative 0.001" in verdict(0.985, Difference(True, 1e-5, None), 1e-3)
