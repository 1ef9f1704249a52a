"""Small programs, each with a trait that breaks tracers and compilers, equal eager bit for bit.

`programs/README.md` states the contract of a case. Every case runs for its number of steps under eager and
under co-execution, waiting at the end of each block or not; with inductor within the case's tolerance.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import coexec
from bench.cases import case_files, difference, load_case, run_case

PROGRAMS = case_files(Path(__file__).parent / "programs")
each_case = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
pytestmark = pytest.mark.filterwarnings("ignore")  # eager's own, which the cases provoke


def assert_equals_eager(path, within_tolerance=False, **options):
    case = load_case(path)
    eager = run_case(case)
    assert eager.error is None
    coexec.reset()
    ours = run_case(case, functools.partial(coexec.GradientTape, check=True, **options))
    compared = difference(ours, eager, case.tolerance if within_tolerance else None)
    report = coexec.explain().summary()
    coexec.reset()
    assert compared.equal, f"{compared.first}, {ours.error!r}\n{report}"


@each_case
@pytest.mark.parametrize("synchronous", [True, False], ids=["waiting", "going on"])
def test_a_case_equals_eager(path, synchronous):
    assert_equals_eager(path, synchronous=synchronous)


@each_case
def test_a_case_equals_eager_with_backward_passes_in_pieces(path, monkeypatch):
    monkeypatch.setattr("coexec.program_state.ALWAYS_IN_PIECES", True)
    assert_equals_eager(path)


@pytest.mark.slow
@each_case
def test_a_case_equals_eager_within_its_tolerance_with_inductor(path):
    assert_equals_eager(path, within_tolerance=True, executor="inductor")
