"""Generated training programs equal eager in everything that can be observed.

`scripts/test --fuzz tests/fuzz` searches for longer, `python -m tests.fuzz` for as long as you like.
"""

import functools
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import coexec
from coexec._native import core
from tests.coexec.harness import coexecuted, linear, run, train
from tests.coexec.uncompiled import use_graphs
from tests.fuzz.check import check, tally
from tests.fuzz.nearly import nearly
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
def test_a_generated_program_equals_eager_with_backward_passes_in_pieces(in_pieces_always, program):
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


@pytest.fixture
def uncompiled(monkeypatch):
    """The executor `inductor` with the graphs of its blocks in the place of their libraries."""
    use_graphs(monkeypatch.setattr)


@pytest.mark.skipif(core is None, reason="compiled blocks need the native module")
@quarter
@given(programs())
def test_a_generated_program_equals_eager_but_for_rounding_with_blocks_made_for_a_compiler(
    uncompiled, program
):
    check(program, executor="inductor", same=nearly)


@pytest.mark.skipif(core is None, reason="compiled blocks need the native module")
def test_blocks_made_for_a_compiler_are_what_runs(uncompiled):
    def step(s, k, tape):
        with tape():
            train(s, s.model(torch.ones(2, 4)).square().mean() * (k + 1.5))

    coexec.reset()
    run(linear, step, 8, functools.partial(coexec.GradientTape, executor="inductor"))
    [report] = coexec.explain().programs
    assert coexecuted(report, 4)
    assert {b.executor for b in report.blocks} == {"inductor"}


SCALARS = (("float", (1.0).hex()), ("float", (1.0 + 1e-6).hex()), ("float", (1.1).hex()))


def observed(value, dtype=torch.float32):
    tensor = torch.tensor([1.0, value], dtype=dtype)
    return {"bytes": tensor.view(torch.uint8).numpy().tobytes(), "dtype": dtype, "shape": (2,)}


@pytest.mark.parametrize(
    ("eager", "rounded", "wrong"),
    [
        SCALARS,
        ("loss 0.50000 of 3", "loss 0.50001 of 3", "loss 0.50000 of 4"),
        (observed(2.0), observed(2.0 + 1e-6), observed(2.1)),
        (("list", (SCALARS[0],)), ("list", (SCALARS[1],)), ("list", (SCALARS[2],))),
        ({"a": SCALARS[0]}, {"a": SCALARS[1]}, {"b": SCALARS[0]}),
    ],
)
def test_rounding_is_no_difference_and_anything_else_is(eager, rounded, wrong):
    assert nearly(eager, eager)
    assert nearly(eager, rounded)
    assert not nearly(eager, wrong)


def test_whole_numbers_and_types_have_to_be_equal():
    assert not nearly(3, 4)
    assert not nearly(observed(2, torch.int64), observed(3, torch.int64))
    assert not nearly(observed(2.0), observed(2.0, torch.float64))


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
