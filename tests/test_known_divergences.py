"""Each behaviour that is known to differ from eager, as a test that shows the difference.

A test passes while the difference is there. When it fails because the outcomes are equal, the difference is
gone: delete the test. `docs/limits.md` lists them, by name, kind and docstring.

Kinds: `silent`, Python gets another value and is not told; `late`, the same happens at a later line;
`raised`, there is an error that eager does not have, or another one; `seen`, only who looks at how things are
done sees it.
"""

from __future__ import annotations

import threading
import warnings
import weakref

import numpy as np
import pytest
import torch

import coexec
from tests.coexec import stepped

STEPS = 6
LAST = STEPS - 1

#: Kind and function of every divergence, in the order of this file.
DIVERGENCES = []


def divergence(kind):
    """Registers a test for the documentation."""
    assert kind in ("silent", "late", "raised", "seen")

    def register(test):
        DIVERGENCES.append((kind, test))
        return test

    return register


@pytest.fixture(autouse=True)
def _fresh():
    coexec.reset()
    yield
    coexec.reset()


@pytest.fixture
def python_first(monkeypatch):
    """The GraphRunner waits as long as it can."""
    monkeypatch.setattr("coexec.program_state.make_graph_runner", stepped.python_first)


def outcomes(step, make=lambda: None, **options):
    """What the last of six steps comes to, in eager and in co-execution."""
    found = []
    for mode in ("eager", "coexec"):
        coexec.reset()
        torch.manual_seed(0)
        state = make()
        for i in range(STEPS):
            outcome = step(lambda mode=mode: coexec.GradientTape(mode=mode, **options), state, i)
        found.append(outcome)
    return tuple(found)


def parameter():
    return torch.nn.Parameter(torch.ones(3))


# --- errors that depend on values --------------------------------------------------------------------


@divergence("late")
def test_python_runs_on_behind_a_call_that_fails_on_its_values():
    """An index out of range, a matrix that has no Cholesky factor, and the like fail in the GraphRunner. The
    exception and the state of all tensors are eager's, but Python has run on to the next fetch or the end of
    the block: it may have printed and appended."""

    def step(tape, embedding, i):
        log = []
        try:
            with tape(), torch.no_grad():
                rows = embedding(torch.tensor([0, 9 if i == LAST else 1]))
                log.append("behind the call")
                log.append(rows.sum().item())
        except IndexError as error:
            log.append(str(error))
        return log

    eager, ours = outcomes(step, lambda: torch.nn.Embedding(5, 2))

    assert eager == ["index out of range in self"]
    assert ours == ["behind the call", "index out of range in self"]


@divergence("late")
def test_a_try_around_a_call_that_fails_on_its_values_catches_nothing():
    """The `except` belongs to a line that Python has left. Where nothing waits for the result, the exception
    leaves the block at its end."""

    def step(tape, state, i):
        matrix, log = torch.eye(3) * (1 if i != LAST else -1), []
        try:
            with tape():
                try:
                    torch.linalg.cholesky(matrix)
                    log.append("factored")
                except RuntimeError:
                    log.append("caught")
        except RuntimeError:
            log.append("an error at the end")
        return log

    assert outcomes(step) == (["caught"], ["factored", "an error at the end"])


@divergence("silent")
def test_a_check_between_two_numbers_that_a_function_makes_in_python_is_not_made():
    """A torch function that is validated is not run, so neither are checks in its Python code. Numbers that
    differ from step to step are fed past them."""

    def step(tape, state, i):
        low, high = 0.1 + 0.01 * i, (0.6 if i < LAST else 0.05) + 0.01 * i
        with tape():
            try:
                torch.nn.functional.hardtanh(torch.ones(2), low, high)
                return "computed"
            except (ValueError, AssertionError, RuntimeError):
                return "refused"

    assert outcomes(step) == ("refused", "computed")


@divergence("raised")
def test_an_integer_beyond_64_bits_has_another_error():
    """The GraphRunner cannot be sent it."""

    def step(tape, state, i):
        with tape():
            try:
                return (torch.ones(3) * (3 + i if i < LAST else 2**70)).tolist()
            except (RuntimeError, OverflowError) as error:
                return type(error).__name__

    eager, ours = outcomes(step)

    assert eager != ours


# --- when things happen ------------------------------------------------------------------------------


@divergence("seen")
def test_a_dropped_result_lives_until_the_block_ends():
    """Its placeholder does, which weak references and finalizers see. It holds no memory: the GraphRunner
    drops values after their last use."""

    def step(tape, state, i):
        with tape():
            x = torch.ones(3) * 2
            reference = weakref.ref(x)
            del x
            return "gone" if reference() is None else "alive"

    assert outcomes(step) == ("gone", "alive")


@divergence("silent")
def test_warnings_of_a_torch_function_come_in_traced_steps_only():
    """A torch function that is validated is not run, so it does not warn."""

    def step(tape, state, i):
        with warnings.catch_warnings(record=True) as caught, tape():
            warnings.simplefilter("always")
            torch.nn.functional.mse_loss(torch.zeros(3, 1), torch.zeros(3)).item()
        return len(caught)

    assert outcomes(step) == (1, 0)


@divergence("seen")
def test_an_operation_does_not_run_when_its_line_does():
    """A profiler shows what Python's own thread runs; timing a line of the block measures the skeleton."""

    def step(tape, state, i):
        x = torch.ones(3, 3)
        with tape(), torch.autograd.profiler.profile(use_cpu=True) as profile:
            y = x @ x
        y.sum().item()
        return "aten::mm" in {event.name for event in profile.function_events}

    assert outcomes(step) == (True, False)


@divergence("seen")
def test_a_tensor_with_a_pending_write_is_of_a_subclass_until_it_is_used():
    """After a block that is left without waiting (`synchronous=False`). `isinstance` does not show it."""

    def step(tape, weight, i):
        with tape(), torch.no_grad():
            weight.add_(1)
        before = type(weight).__name__
        return before, weight.tolist(), type(weight).__name__

    eager, ours = outcomes(step, parameter, synchronous=False)

    assert eager == ("Parameter", [7.0] * 3, "Parameter")
    assert ours in (eager, ("PendingParameter", [7.0] * 3, "Parameter"))  # the second without a native runner


# --- autograd and views ------------------------------------------------------------------------------


@divergence("seen")
def test_the_history_of_a_kept_loss_leads_nowhere():
    """A kept tensor whose backward pass ran in the block has a `grad_fn` of the right name and nothing behind
    it. A second backward pass through it is an error in both, with another text."""

    def step(tape, weight, i):
        with tape() as t:
            loss = (weight * 2).sum()
            t.gradient(loss, [weight])
        return loss.grad_fn.name(), type(loss.grad_fn.next_functions[0][0]).__name__

    eager, ours = outcomes(step, parameter)

    assert eager == ("SumBackward0", "MulBackward0")
    assert ours == ("SumBackward0", "AccumulateGrad")


@divergence("raised")
def test_a_part_of_the_graph_that_grad_went_around_cannot_be_used_behind_the_block():
    """Every node that the target reaches counts as used, not only those on the way to the sources."""

    def step(tape, weight, i):
        with tape():
            h = weight * 2
            torch.autograd.grad((h * h).sum(), [h])
        try:
            h.backward(torch.ones(3))
            return "reached"
        except RuntimeError:
            return "an error"

    assert outcomes(step, parameter) == ("reached", "an error")


@divergence("seen")
def test_a_gradient_that_two_hooks_are_given_is_two_objects():
    """They are on the same memory, as the one object of eager is. The `backward` of custom functions gets
    objects of its own, too."""

    def step(tape, weight, i):
        given = []
        with tape():
            one, two = weight * 2, weight * 3
            one.register_hook(given.append)
            two.register_hook(given.append)
            (one + two).sum().backward()
        return given[0] is given[1]

    eager, ours = outcomes(step, parameter)
    assert eager
    assert not ours


@divergence("silent")
def test_a_hook_of_a_gradient_accumulator_is_not_called():
    """A hook that was registered on an autograd node that computes nothing is not seen."""

    def step(tape, state, i):
        weight, calls = state
        if i == 0:
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]
            node.register_hook(lambda *gradients: calls.append(1))
            state.append(node)
        with tape():
            weight.grad = None
            (weight * 2).sum().backward()
        return len(calls)

    eager, ours = outcomes(step, lambda: Watched(parameter()))

    assert eager == STEPS
    assert ours < eager


class Watched(list):
    """A parameter and the calls of its hook; what is appended later is kept alive."""

    def __init__(self, weight):
        self.weight, self.calls = weight, []

    def __iter__(self):
        return iter((self.weight, self.calls))


@divergence("seen")
def test_a_kept_view_is_no_view_of_its_base():
    """It shares memory as in eager, but autograd doesn't know: `_base`, `_is_view()` and `_version` differ,
    and a backward pass does not notice that what it saved was written through the other one."""

    def step(tape, state, i):
        with tape():
            x = torch.ones(4) * 2
            view = x[:2]
        x.add_(1)
        return view._is_view(), view.tolist()

    assert outcomes(step) == ((True, [3.0, 3.0]), (False, [3.0, 3.0]))


@divergence("seen")
def test_a_block_raises_the_version_of_what_it_writes_once():
    """Not once for each write."""

    def step(tape, weight, i):
        before = weight._version
        with tape(), torch.no_grad():
            weight.add_(1)
            weight.sum().item()
            weight.mul_(2)
        return weight._version - before

    assert outcomes(step, parameter) == (2, 1)


@divergence("raised")
def test_a_write_through_data_raises_the_version_of_the_tensor():
    """A backward pass behind the block that needs what was there is an error, and no wrong gradient."""

    def step(tape, weight, i):
        x = torch.ones(3, requires_grad=True)
        product = x * weight
        with tape():
            weight.data.clamp_(0, 1)
        try:
            product.sum().backward()
        except RuntimeError as e:
            return "modified by an inplace operation" in str(e)
        return "nothing raised"

    assert outcomes(step, parameter) == ("nothing raised", True)


@divergence("silent")
def test_an_array_that_was_an_index_may_change_before_the_backward_pass():
    """Eager's backward pass looks at the array again."""

    def step(tape, weight, i):
        index = np.array([0, 1])
        with tape() as t:
            chosen = weight[index]
            index[:] = [1, 2]
            [gradient] = t.gradient(chosen.sum(), [weight])
        return gradient.tolist()

    eager, mine = outcomes(step, parameter)
    assert (eager, mine) == ([0.0, 1.0, 1.0], [1.0, 1.0, 0.0])


@divergence("seen")
def test_a_tensor_kept_from_inference_mode_is_an_ordinary_one():
    """`is_inference()` is false behind the block."""

    def step(tape, state, i):
        with tape(), torch.inference_mode():
            x = torch.ones(3) * 2
        return x.is_inference()

    assert outcomes(step) == (True, False)


# --- other threads and other memory ------------------------------------------------------------------


@divergence("silent")
def test_another_thread_sees_state_as_it_was_before_the_block():
    """It sees what the block writes when the block has ended."""

    def step(tape, weight, i):
        seen = []
        with tape(), torch.no_grad():
            weight.add_(1)
            thread = threading.Thread(target=lambda: seen.append(weight.tolist()[0]))
            thread.start()
            thread.join()
        return seen

    assert outcomes(step, parameter) == ([7.0], [6.0])


@divergence("raised")
def test_a_tensor_that_a_program_has_used_cannot_be_swapped():
    """`torch.utils.swap_tensors`, and what converts or loads a module with
    `torch.__future__.set_swap_module_params_on_conversion(True)`, refuse a tensor with weak references: the
    program has some. After `coexec.reset()` they work."""

    def step(tape, state, i):
        weight, other = state
        with tape():
            (weight * 2).sum().item()
        if i < LAST:
            return None
        try:
            torch.utils.swap_tensors(weight, other)
        except RuntimeError:
            coexec.reset()
            torch.utils.swap_tensors(weight, other)
            return "an error", weight.tolist()
        return "no error", weight.tolist()

    def make():
        return parameter(), torch.nn.Parameter(torch.zeros(3))

    assert outcomes(step, make) == (("no error", [0.0] * 3), ("an error", [0.0] * 3))


@divergence("raised")
def test_another_thread_cannot_use_a_result_of_the_block():
    """It meets a placeholder, and the torch functions of that thread are not watched."""

    def step(tape, state, i):
        seen = []

        def look():
            try:
                seen.append(doubled.tolist())
            except RuntimeError:
                seen.append("an error")

        with tape():
            doubled = torch.ones(1) * 2
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        return seen

    assert outcomes(step) == ([[2.0]], ["an error"])


@divergence("silent")
def test_an_array_shows_what_the_block_writes_when_the_block_has_ended():
    """And what Python writes to the array in the block is not ordered with what the block writes."""

    def step(tape, array, i):
        with tape():
            torch.from_numpy(array).add_(1)
            return array.tolist()

    assert outcomes(step, lambda: np.zeros(2)) == ([6.0, 6.0], [5.0, 5.0])


@divergence("silent")
def test_a_view_of_an_array_that_ends_with_the_block_keeps_the_values_of_its_first_use():
    """A view that is made and dropped in the block is one of the copy that is taken then."""

    def step(tape, array, i):
        with tape():
            view = torch.from_numpy(array)[:2]
            if i == LAST:
                array[0] = 9
            more = view + 1
            del view
            return more.tolist()

    assert outcomes(step, lambda: np.zeros(3)) == ([10.0, 1.0], [1.0, 1.0])


@divergence("silent")
def test_what_another_thread_writes_is_not_ordered_with_the_block(python_first):
    """Operations of the block see such a write or not, wherever their lines stand."""

    def step(tape, x, i):
        with tape():
            before = x * 2
            thread = threading.Thread(target=lambda: x.add_(1))
            thread.start()
            thread.join()
            after = x * 2
        return before.tolist() == after.tolist()

    assert outcomes(step, lambda: torch.zeros(3)) == (False, True)


@divergence("silent")
def test_seeding_through_the_object_of_the_default_generator_is_not_ordered(python_first):
    """Methods of `torch.default_generator` are not watched; in the block they meet the GraphRunner at an
    unknown point. `torch.manual_seed` is watched."""

    def step(tape, state, i):
        with tape():
            torch.default_generator.manual_seed(i)
            first = torch.rand(1)
            torch.default_generator.manual_seed(i)
            return torch.equal(first, torch.rand(1))

    assert outcomes(step) == (True, False)
