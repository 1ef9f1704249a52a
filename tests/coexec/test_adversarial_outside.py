"""The world around the tensors: errors of kernels, random state, modes, threads, C++ that wants a value."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import coexec
from tests.coexec.harness import coexecuted, compare, linear, nothing, train, weights

# --- errors that depend on values ----------------------------------------------------------------


@pytest.mark.parametrize("function", ["cholesky", "inv"])
def test_a_factorization_that_fails_raises(function):
    def step(s, k, tape):
        matrix = torch.eye(3) * (1.0 if k != 5 else (-1.0 if function == "cholesky" else 0.0))
        with tape():
            return getattr(torch.linalg, function)(matrix) * 2

    compare(nothing, step, 8)


def test_an_index_out_of_range_raises_eagers_error(compared):
    def step(s, k, tape):
        index = torch.tensor([0, 1 if k != 5 else 77])
        with tape():
            return F.embedding(index, s.w).sum().detach()

    compared(weights("w", size=(5, 2)), step, 8)


def test_an_index_out_of_range_in_a_write_raises_eagers_error():
    def step(s, k, tape):
        index = torch.tensor([1 if k != 5 else 9])
        with tape():
            s.table.add_(1)
            s.table.index_add_(0, index, torch.ones(1))
            s.table.mul_(2)

    compare(lambda: SimpleNamespace(table=torch.zeros(4)), step, 8)


def test_a_call_with_wrong_shapes_raises_eagers_error(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4 if k != 5 else 3)
        with tape():
            train(s, s.model(x).pow(2).mean())

    assert coexecuted(compared(linear, step, 10), 5)


def test_an_error_caught_inside_of_the_block(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = s.model(x).pow(2).mean()
            try:
                if k == 5:
                    raise ValueError("mine")
                if k == 7:
                    torch.randn(2, 3) @ torch.randn(2, 3)
            except (ValueError, RuntimeError) as e:
                s.log.append(str(e))
            train(s, loss)

    assert coexecuted(compared(linear, step, 10), 5)


def test_anomaly_detection_raises_as_in_eager():
    def step(s, k, tape):
        x = torch.ones(3) if k != 5 else -torch.ones(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True), tape():
                s.w.grad = None
                (x * s.w.abs()).sqrt().sum().backward()

    compare(weights("w"), step, 8)


# --- shapes that depend on values ----------------------------------------------------------------


def test_a_split_at_places_that_a_tensor_holds():
    def step(s, k, tape):
        x, place = torch.randn(6), torch.tensor([2 if k < 4 else 3])
        with tape():
            first, _ = torch.tensor_split(x, place)
            return first.sum()

    compare(nothing, step, 8)


def test_sequences_of_varying_lengths_are_packed(compared):
    lengths = [[3, 2], [3, 2], [3, 2], [3, 1], [2, 2], [3, 2], [1, 1], [3, 3]]

    def step(s, k, tape):
        x = torch.randn(3, 2, 2)
        with tape():
            packed = pack_padded_sequence(x, torch.tensor(lengths[k]))
            return packed.data * 2, packed.batch_sizes

    compared(nothing, step, len(lengths))


def test_masks_and_nonzero(compared):
    def step(s, k, tape):
        x = torch.randn(5)
        with tape():
            y = x[x > 0]
            z = x.nonzero()
            x[x < 0] = 0.0
        return x, y, z

    compared(nothing, step, 6)


def test_a_masked_write_is_coexecuted(compared):
    def step(s, k, tape):
        x = torch.randn(5)
        with tape():
            x[x < 0] = 0.0
            y = torch.where(x > 1, x, -x)
        return x, y

    assert coexecuted(compared(nothing, step, 6), 3)


# --- random numbers ------------------------------------------------------------------------------


def test_every_kind_of_random_number_is_eagers(compared):
    def step(s, k, tape):
        with tape():
            a, b, c = F.dropout(torch.ones(4), 0.5), torch.randn(3), torch.randperm(4)
            d, e = torch.randint(0, 5, (3,)), torch.empty(3).uniform_(0, 1.5 + k)
            f, g = torch.bernoulli(torch.full((4,), 0.5)), torch.multinomial(torch.ones(4), 2)
            torch.randn(2)
            h, i = F.gumbel_softmax(b, 0.6 + 0.01 * k), torch.normal(b, 1.0)
        return a, b, c, d, e, f, g, h, i

    assert coexecuted(compared(nothing, step, 8), 4)


def test_random_numbers_of_a_cancelled_iteration_are_drawn_once(compared):
    def step(s, k, tape):
        with tape():
            b = torch.randn(3)
            print(b)
            if k in (3, 5):
                print(torch.randn(2))
            d = torch.randn(2)
            if k == 6:
                raise ValueError("mine")
        return d

    assert coexecuted(compared(nothing, step, 9), 3)


@pytest.mark.parametrize("first", [0, 3])
def test_seeding_inside_of_the_block(first):
    def step(s, k, tape):
        with tape():
            a = torch.rand(3)
            if k >= first:
                torch.manual_seed(k)
            b = torch.rand(3)
        return a, b

    compare(nothing, step, 8)


@pytest.mark.parametrize("own", [True, False])
def test_a_generator_is_seeded_inside_of_the_block(own):
    def step(s, k, tape):
        generator = s.generator if own else torch.default_generator
        with tape():
            a = torch.rand(3, generator=generator)
            generator.manual_seed(k)
            b = torch.rand(3, generator=generator)
        return a, b

    compare(lambda: SimpleNamespace(generator=torch.Generator()), step, 8)


def test_a_generator_of_ones_own_is_eagers(compared):
    def step(s, k, tape):
        s.generator.manual_seed(k)
        with tape():
            a = torch.rand(3, generator=s.generator)
            if k == 5:
                a = a + torch.rand(3, generator=s.generator)
        return a

    assert coexecuted(compared(lambda: SimpleNamespace(generator=torch.Generator()), step, 8), 4)


# --- modes and settings --------------------------------------------------------------------------


class DispatchLog(TorchDispatchMode):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.log.append(str(function))
        return function(*args, **(kwargs or {}))


class FunctionLog(TorchFunctionMode):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.log.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FunctionLog, DispatchLog])
@pytest.mark.parametrize("place", ["always", "outside", "at step 5"])
def test_modes_of_the_user_see_what_they_see_in_eager(mode, place):
    def step(s, k, tape):
        x = torch.randn(3)
        with mode(s.log) if place == "outside" and k >= 5 else contextlib.nullcontext():
            with tape():
                a = x + 1
                with (
                    mode(s.log)
                    if place == "always" or (place, k) == ("at step 5", 5)
                    else contextlib.nullcontext()
                ):
                    y = a * 2
        return y

    compare(nothing, step, 8)


def test_settings_of_operations_changed_between_and_inside_of_iterations(compared):
    def step(s, k, tape):
        x, w = torch.randn(3, 3), s.w
        torch.set_default_dtype(torch.float64 if k % 4 == 3 else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=k % 3 == 1):
            with tape():
                w.grad = None
                y = x.float() @ w
                with torch.autocast("cpu", enabled=False):
                    z = x.float() @ w
                (y.float() + z).sum().backward()
                one = torch.ones(2)
        torch.set_default_dtype(torch.float32)
        return y.detach(), one

    compared(weights("w", size=(3, 3)), step, 14)


def test_a_new_path_after_a_region_of_autocast():
    def step(s, k, tape):
        x = torch.randn(3, 3)
        with tape():
            s.w.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                y, z = x @ s.w, (x + 1) @ s.w
                loss = y.float().pow(2).mean() + z.float().exp().mean()
            if k == 5:
                loss = loss * 3
            loss.backward()

    compare(weights("w", size=(3, 3)), step, 8)


def test_a_new_path_after_a_change_of_the_default_dtype():
    def step(s, k, tape):
        with tape():
            y = torch.ones(3)
            torch.set_default_dtype(torch.float64)
            z = torch.ones(3)
            if k == 5:
                z = z * 2
            torch.set_default_dtype(torch.float32)
        return y, z

    compare(nothing, step, 8)


def test_the_kernel_of_attention_is_chosen_by_the_user():
    attention = torch.nn.attention
    backends = attention.SDPBackend

    def step(s, k, tape):
        q, key, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
        with attention.sdpa_kernel(backends.MATH if k >= 5 else backends.FLASH_ATTENTION), tape():
            return F.scaled_dot_product_attention(q, key, v, is_causal=True)

    compare(nothing, step, 8)


def test_inference_mode_inside_and_outside(compared):
    def step(s, k, tape):
        with torch.inference_mode(), tape():
            y = s.x * 2
            print(y.is_inference())
        with tape():
            with torch.inference_mode():
                z = s.x * 3
            print(z.is_inference())
        return y

    compared(lambda: SimpleNamespace(x=torch.randn(3)), step, 8, programs=2)


# --- who else holds a placeholder ----------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        pickle.dumps,
        copy.deepcopy,
        copy.copy,
        lambda y: torch.save(y, io.BytesIO()),
        lambda y: np.from_dlpack(y).copy(),
        lambda y: torch.from_dlpack(y) * 2,
        lambda y: np.array([y, y]),
        lambda y: torch.tensor([y[0], y[1]]),
        torch.as_tensor,
        torch.asarray,
        lambda y: torch.stack(list(y)),
        lambda y: y.untyped_storage().nbytes(),
        lambda y: y.data_ptr() != 0,
        lambda y: sorted(y.tolist()),
        lambda y: max(y),
        lambda y: [i for i, v in enumerate(y) if v > 0],
        lambda y: y.new_tensor([1.0, 2.0]),
        lambda y: torch.utils.data.default_collate([y, y]),
        lambda y: y.view(-1).numpy().sum(),
        lambda y: {y: 1}[y],
    ],
)
def test_a_result_is_looked_at_in_an_unusual_way_for_the_first_time(look):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x * 2
            seen = look(y) if k in (4, 7) else None
            z = y * 3
        return y, seen if not isinstance(seen, bytes) else pickle.loads(seen), z

    compare(nothing, step, 9)


@pytest.mark.parametrize(
    "look",
    [
        lambda y: nn.Parameter(y),
        lambda y: torch.Tensor._make_subclass(torch.Tensor, y),
    ],
)
def test_a_result_becomes_a_parameter_for_the_first_time(look):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x * 2
            seen = look(y) if k == 5 else None
            z = y * 3
        return y, seen, z

    compare(nothing, step, 8)


@pytest.mark.parametrize(
    "look",
    [
        lambda y: torch.Tensor._make_subclass(torch.Tensor, y.detach()),
        lambda y: torch.from_numpy(y.detach().numpy() + 1),
    ],
)
@pytest.mark.parametrize("first", [0, 5])
def test_gradients_flow_after_c_code_has_looked_at_a_result(look, first):
    def step(s, k, tape):
        with tape():
            s.w.grad = None
            y = s.w * 2
            z = look(y) if k >= first else y.detach()
            (y * z).sum().backward()

    compare(weights("w"), step, 9)


class Mine(torch.Tensor):
    pass


def test_a_subclass_comes_in_for_the_first_time():
    def step(s, k, tape):
        x = torch.randn(3)
        x = x.as_subclass(Mine) if k == 5 else x
        with tape():
            return x * 2

    compare(nothing, step, 8)


def test_a_lazy_layer_is_made_in_the_first_iteration():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s._model(x).pow(2).mean()
            y.backward()
        return y.detach()

    compare(lambda: SimpleNamespace(_model=nn.Sequential(nn.LazyLinear(3), nn.ReLU())), step, 6)


def test_attributes_of_results_stay(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x * 2
            y.mine = k
            z = y + 1
        return y.mine, hasattr(z, "mine"), y, z

    assert coexecuted(compared(nothing, step, 8), 4)


# --- where the tape is entered -------------------------------------------------------------------


def test_a_generator_function_holds_the_block_open(compared):
    def step(s, k, tape):
        def steps():
            with tape():
                a = s.model(torch.randn(5, 4))
                yield a.detach().sum().item()
                b = a.pow(2).mean()
                yield b.item()
                train(s, b)

        generator = steps()
        print(next(generator))
        if k == 5:
            generator.close()
        else:
            print(next(generator), next(generator, None))

    assert coexecuted(compared(linear, step, 10), 5)


def test_the_tape_is_entered_by_a_helper(compared):
    def step(s, k, tape):
        @contextlib.contextmanager
        def mine():
            with tape():
                yield

        with contextlib.ExitStack() as stack:
            stack.enter_context(mine())
            train(s, s.model(torch.randn(5, 4)).pow(2).mean())
        with contextlib.ExitStack() as stack:
            stack.enter_context(tape())
            print(s.model(torch.randn(5, 4)).mean().detach())

    for report in compared(linear, step, 8, programs=2):
        assert coexecuted(report, 4)


def test_the_block_is_left_by_return_break_and_continue(compared):
    def step(s, k, tape):
        for i in range(3):
            with tape():
                loss = s.model(torch.randn(5, 4)).pow(2).mean()
                if i == k % 3:
                    continue
                train(s, loss)
                if i == 2:
                    return "returned"
        return "at the end"

    compared(linear, step, 8)


def test_threads_with_tapes_of_their_own_leave_the_random_module_as_it_was():
    here, there = threading.Event(), threading.Event()
    before = torch.random.default_generator

    def other():
        with coexec.GradientTape(key="other"):
            there.set()
            here.wait(10)

    thread = threading.Thread(target=other)
    with coexec.GradientTape(key="main"):
        thread.start()
        there.wait(10)
    here.set()
    thread.join()
    after, torch.random.default_generator = torch.random.default_generator, before

    assert after is before


@pytest.mark.parametrize("where", ["in the forward pass", "at the commit", "on a path"])
def test_random_numbers_drawn_after_a_block_that_was_left_early(where):
    slow = torch.randn(1200, 1200)

    def step(s, k, tape):
        with tape():
            x = slow
            for _ in range(3):
                x = x @ slow / 1200
            if where == "in the forward pass":
                s.w.copy_(F.dropout(x[:3, 0]))
            elif where == "at the commit":
                s.w.add_(x[:3, 0]).bernoulli_(0.5)
            else:
                s.w.copy_(x[:3, 0] + (torch.rand(3) if k % 3 else 1.0))
        return torch.rand(3), s.w.clone()

    compare(lambda: SimpleNamespace(w=torch.zeros(3)), step, 12, synchronous=False)


def test_memory_that_cpp_fills_without_an_operation():
    """The mean of `ctc_loss` divides by lengths, a tensor that C++ makes of Python's numbers."""

    def step(s, k, tape):
        x = torch.randn(13, 4)
        with tape():
            scores = s.model(x)[:, None].expand(13, 2, 3).log_softmax(2)
            targets = torch.ones(2, 2, dtype=torch.long)
            loss = F.ctc_loss(scores, targets, (10, 10), (2, 2))
            train(s, loss)
            s.log.append(loss.item())

    report = compare(linear, step, 24)
    assert any(c.id == "CX0111" for c in report.causes), report.summary()


def index(s, k):
    s.numbers.add_(1)
    return s.table[s.numbers]


def divide(s, k):
    s.table.add_(1)
    s.counts.floor_divide_(torch.tensor([1, 0 if k == 6 else 1]))
    return s.table.mul_(2)


def fill(s, k):
    return s.half.fill_(20000.0 * (k % 7))


@pytest.mark.parametrize("write", [index, divide, fill])
def test_what_fails_on_values_fails_before_anything_is_committed(write):
    def make():
        return SimpleNamespace(
            table=torch.randn(6, 40),
            numbers=torch.zeros(2, dtype=torch.long),
            counts=torch.tensor([64, 64]),
            half=torch.ones(100, dtype=torch.half),
        )

    def step(s, k, tape):
        with tape():
            result = write(s, k)
        return result.clone()

    report = compare(make, step, 9)

    assert report.steps["co-execution"] >= 2, report.summary()
    assert report.steps["fallback"] >= 1, report.summary()


NO_GRAD = {
    "row": lambda p: p[0].fill_(0.5),
    "flat": lambda p: p.view(-1).mul_(0.5),
    "transposed": lambda p: p.t().add_(1),
    "initialized": lambda p: torch.nn.init.zeros_(p[1]),
    "diagonal": lambda p: p.diagonal().copy_(torch.ones(3)),
}


@pytest.mark.parametrize("name", NO_GRAD)
def test_a_parameter_is_written_through_a_view_without_gradients(name):
    def step(s, k, tape):
        with tape(), torch.no_grad():
            NO_GRAD[name](s.w)

    assert coexecuted(compare(weights("w", size=(3, 3)), step, 6), 3)
