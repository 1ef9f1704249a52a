"""What compilers take for granted, and programs that do otherwise: memory, types, random numbers, errors."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import coexec
from coexec._native import core
from tests.coexec.test_blocks import (
    SHARED,
    of_a_result,
    of_a_shadow,
    of_a_transposed_view,
    of_one_of_two,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(core is None, reason="compiled blocks need the native module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "coexec-cache"))


def reports_of(run, executors=frozenset({"inductor"})):
    """Compares a program with eager; what its blocks ran by, if it was co-executed at all."""

    def seeded(tape):
        torch.manual_seed(0)
        return run(tape)

    expected = seeded(contextlib.nullcontext)
    found = seeded(functools.partial(coexec.GradientTape, executor="inductor", check=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    [report] = coexec.explain().programs
    assert report.steps["co-execution"] >= 3, report.summary()
    assert {b.executor for b in report.blocks} == executors, report.summary()


def test_a_number_that_varies_does_not_decide_about_types():
    def run(tape):
        p, x = torch.randn(40, 40, requires_grad=True), torch.randn(40, 40)
        optimizer = torch.optim.SGD([p], lr=0.1)
        for weight in (0.1, 0.2, 0.3, 0.35, 0.45, 0.55, 0.65):
            with tape():
                loss = (p * x).sum() * weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                del loss
        return p, p.grad

    reports_of(run)


NUMBERS = {
    "a float without dimensions": lambda b, n, k: b.sum() * (0.1 * k + 1),
    "integers times a float": lambda b, n, k: n * (0.1 * k + 1.05),
    "integers compared with a float": lambda b, n, k: n > 0.3 * k,
    "a float in bfloat16": lambda b, n, k: b.bfloat16() * 2.0 ** (k + 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_results_have_eagers_types_whatever_the_number(name):
    def run(tape):
        b, n, seen = torch.randn(40, 40), torch.arange(4), []
        for k in range(7):
            with tape():
                y = NUMBERS[name](b, n, k)
            seen.append(y)
        return seen

    reports_of(run)


def test_a_number_that_may_not_fit_is_left_to_aten():
    def run(tape):
        n, seen = torch.arange(4, dtype=torch.int32), []
        for k in range(7):
            with tape():
                y = n.sum(dtype=torch.int32) * (k + 3)
            seen.append(y)
        return seen

    reports_of(run, {"inductor", "aten"})


@pytest.mark.parametrize("compute", [of_a_shadow, of_a_result, of_a_transposed_view, of_one_of_two])
def test_memory_with_several_names_stays_one_memory_across_libraries(compute):
    def run(tape):
        b, seen = torch.randn(40, 40), []
        for k in range(10):
            with tape():
                y = compute(b, k)
                seen.append(y.item())
        return seen

    reports_of(run, SHARED[compute])


NOTHING = {
    "times one": lambda b: b * torch.ones(40, 40),
    "minus zero": lambda b: b - torch.zeros(40, 40),
    "transposed": lambda b: b.t() * torch.ones(40, 40),
    "expanded": lambda b: b[0].expand(3, 40).clone(memory_format=torch.preserve_format)[:, :5],
}


@pytest.mark.parametrize("nothing", NOTHING.values(), ids=NOTHING)
def test_a_result_that_equals_an_input_has_memory_of_its_own(nothing):
    def run(tape):
        b, seen = torch.zeros(40, 40), []
        for _ in range(6):
            with tape():
                y = nothing(b)
                b.add_(1)
            seen.append(y)
        return seen

    reports_of(run)


def test_random_numbers_that_nobody_needs_are_drawn():
    def run(tape):
        b, seen = torch.ones(40, 40), []
        for _ in range(6):
            with tape():
                torch.nn.functional.dropout(b, 0.5)
                y = torch.rand(1)
            seen.append(y)
        return seen, torch.rand(3)

    reports_of(run)


def test_a_write_through_a_view_raises_the_version():
    def run(tape):
        w = torch.randn(40, 40, requires_grad=True)
        p, b, seen = torch.randn(40, 40), torch.randn(40, 40), []
        for k in range(16):
            loss = (w * b).sum()  # saves b
            with tape():
                if k % 4 == 1:
                    b.mul_(0.99)
                _ = p * 2 if k % 2 else p * 3
                if k % 4:
                    b[0].mul_(0.9)
            try:
                loss.backward()
                seen.append(1.0)
            except RuntimeError:
                seen.append(0.0)
        return seen, b

    reports_of(run)


INDEXED = {
    "index_select": lambda e, i: e.index_select(0, i),
    "index_add": lambda e, i: torch.zeros(5, 1).index_add(0, i, e[:2]),
    "index_copy": lambda e, i: torch.zeros(5, 1).index_copy(0, i, e[:2]),
}


@pytest.mark.parametrize("name", INDEXED)
def test_a_negative_index_raises_where_eager_does(name):
    messages = []

    def run(tape):
        e, seen = torch.arange(5.0).view(5, 1), []
        for k in range(8):
            i = torch.tensor([0, -1 if k == 6 else 1])
            try:
                with tape():
                    y = INDEXED[name](e, i)
                seen.append(y)
            except (IndexError, RuntimeError) as error:
                messages.append(f"{type(error).__name__}: {error}")
        return seen

    reports_of(run)
    assert len(messages) == 2
    assert messages[0] == messages[1]


def test_an_iteration_that_is_given_up_inside_of_a_library_prints_nothing(capfd):
    def run(tape):
        w, seen = torch.randn(40, 40), []
        for k in range(9):
            a, b = torch.randn(40, 40), torch.randn(40, 40)
            with tape():
                y = w @ a
                if k == 6:
                    y = y.tanh()  # on no path; the library waits for b
                y = (y @ b).sum()
            seen.append(y)
        return seen

    reports_of(run)
    assert "API call failed" not in capfd.readouterr().err
