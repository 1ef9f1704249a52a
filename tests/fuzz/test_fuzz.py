"""Generated training programs equal eager in everything that can be observed.

`scripts/test --fuzz tests/fuzz` searches for longer, `python -m tests.fuzz` for as long as you like.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.fuzz.check import check, tally
from tests.fuzz.programs import Generated, programs

EXAMPLES = settings.default.max_examples
quick = settings(suppress_health_check=list(HealthCheck))
quarter = settings(quick, max_examples=EXAMPLES // 4)


@quick
@given(programs())
def test_a_generated_program_equals_eager(program):
    check(program)


@quarter
@given(programs())
def test_a_generated_program_equals_eager_in_lazy_mode(program):
    check(program, mode="lazy")


@quarter
@given(programs())
def test_a_generated_program_equals_eager_with_the_interpreted_graph_runner(use_runner, program):
    use_runner("interpreted")
    check(program)


@settings(quick, max_examples=20)
@given(programs())
def test_a_generated_program_is_source_that_runs_twice_to_the_same_end(program):
    check(program, mode="eager")


class Wrong:
    """A program with a known difference: a dropped result is still there."""

    def load(self):
        def step(state, k, tape):
            with tape():
                x = torch.ones(3) * 2
                reference = weakref.ref(x)
                del x
                state.log.append(reference() is None)

        return lambda: SimpleNamespace(log=[]), step


def test_a_program_that_differs_is_found_at_the_step_and_by_the_value():
    before = tally.programs

    with pytest.raises(
        AssertionError, match=r"step \d, state: it\.log\.1\.\d: eager True, co-executed False"
    ):
        check(Wrong())

    assert tally.programs == before


def test_a_generated_program_prints_as_its_source():
    assert repr(Generated("x = 1\n")) == "this program:\nx = 1\n"
