"""What coexec takes for granted of the private parts of PyTorch: a new release fails here first."""

from __future__ import annotations

import contextlib
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coexec import _private
from coexec.block_watch import BlockWatch
from coexec.tracegraph.calls import meta_of
from tests.coexec.harness import Twice


def noting(called):
    """A callback that notes the names of what is called."""

    def note(kind, name, arguments):
        called.append(name)
        return contextlib.nullcontext()

    return note


class Hollow(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(function)


def test_a_wrapper_has_the_metadata_and_no_memory():
    meta = meta_of(torch.randn(2, 3).t().requires_grad_())

    wrapper = _private.make_wrapper(Hollow, meta)

    assert type(wrapper) is Hollow
    assert (wrapper.shape, wrapper.stride(), wrapper.dtype, wrapper.requires_grad) == (
        torch.Size([3, 2]),
        (1, 3),
        torch.float32,
        True,
    )
    with pytest.raises(RuntimeError, match="invalid python storage"):
        wrapper.untyped_storage().data_ptr()


def test_an_object_becomes_another_tensor_for_everyone_who_holds_it():
    placeholder = _private.make_wrapper(Hollow, meta_of(torch.ones(2)))
    holder, weak = [placeholder], weakref.ref(placeholder)
    w = torch.ones(2, requires_grad=True)
    real = w * 3

    _private.become(placeholder, real)

    assert type(holder[0]) is torch.Tensor
    assert weak() is placeholder
    assert placeholder.tolist() == [3, 3]
    placeholder.sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_autograd_nodes_can_be_named():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    _private.name_node(Function, "MulBackward0")

    assert "grad_fn=<MulBackward0>" in repr(Function.apply(torch.ones(1, requires_grad=True)))


def test_tensors_of_a_transform_are_told_apart():
    seen = []

    def function(x):
        seen.append(_private.is_transformed(x))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))

    assert seen == [True]
    assert not _private.is_transformed(torch.ones(2))


def test_a_storage_number_names_memory_while_it_is_held():
    x = torch.ones(4)

    assert _private.storage_of(x).cdata == _private.storage_of(x[1:]).cdata == x.untyped_storage()._cdata
    assert _private.storage_of(x).cdata != _private.storage_of(x.clone()).cdata


def test_memory_that_others_share_is_not_exclusive():
    x, array = torch.ones(4), np.ones(4)
    alias = torch.ones(4)
    view = alias[1:]

    assert _private.is_exclusive(x)
    assert not _private.is_exclusive(alias)
    assert not _private.is_exclusive(torch.from_numpy(array))
    del view
    assert _private.is_exclusive(alias)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class NothingEither(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_modes_and_transforms_around_a_call_are_counted():
    assert _private.transform_depth(0) == (0, False)
    with Nothing():
        assert _private.transform_depth(0) == (1000, False)
        assert _private.transform_depth(1) == (0, False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert _private.transform_depth(0) == (0, True)
    seen = []
    torch.func.vmap(lambda x: (seen.append(_private.transform_depth(0)), x)[1])(torch.ones(2))
    assert seen[0][0] % 1000 == 1


def test_modes_of_the_user_have_names_and_devices_are_none_of_them():
    assert _private.foreign_modes() == []
    with Nothing(), NothingEither(), torch.device("cpu"):
        assert sorted(_private.foreign_modes()) == ["Nothing", "NothingEither"]
    with torch.device("meta"):
        assert "meta" in _private.default_device()
    assert _private.default_device() == "[]"


def test_operations_pass_no_dispatch_mode_without_modes():
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Log():
        with _private.WithoutModes():
            torch.ones(1) + 1
        assert seen == []
        torch.ones(1) + 1
    assert seen


def test_backward_passes_run_below_the_engines_frame():
    assert _private.ENGINE_CODE.co_name == "_engine_run_backward"


@pytest.mark.parametrize(
    "touch",
    [
        lambda: torch.manual_seed(3),
        torch.seed,
        torch.initial_seed,
        torch.get_rng_state,
        lambda: torch.set_rng_state(STATE),
    ],
)
def test_functions_of_the_random_module_are_watched(touch):
    called = []
    with BlockWatch(noting(called)):
        touch()

    assert called
    assert all(name.startswith("the default generator's ") for name in called)
    assert torch.random.default_generator is torch.default_generator


STATE = torch.get_rng_state()


def test_operations_that_draw_are_not_watched():
    called = []
    with BlockWatch(noting(called)):
        torch.rand(1)
        torch.nn.functional.dropout(torch.ones(1))

    assert called == []


def test_functions_and_parameters_made_in_a_block_are_watched_and_work():
    called, x = [], torch.ones(2, requires_grad=True)
    with BlockWatch(noting(called)):
        y = Twice.apply(x)
        p = torch.nn.Parameter(x.detach(), False)
    torch.nn.Parameter(x.detach())

    assert called == ["Twice.apply", "nn.Parameter", "Tensor._make_subclass"]
    assert "_make_subclass" not in vars(torch.Tensor)
    assert y.grad_fn.name() == "TwiceBackward"
    assert type(p) is torch.nn.Parameter
    assert not p.requires_grad


def test_the_watch_of_one_thread_does_not_see_another():
    called = []
    with BlockWatch(noting(called)):
        thread = threading.Thread(target=torch.initial_seed)
        thread.start()
        thread.join()

    assert called == []


def test_a_symbolic_carrier_has_a_symbol_of_its_range_and_what_is_assumed_of_it_is_told():
    first, second = carriers = _private.symbolic_carriers([(2, 64, 7), (2, 64, 7)])

    with _private.fake_mode_of(first):
        made = torch.empty(first.shape[0] * 3, 4)
    assert made.shape[0] == 3 * first.shape[0]
    assert bool(first.shape[0] <= 64)
    assert _private._assumptions(carriers) == [], "all of this is true of each size in the range"

    assert bool(first.shape[0] == second.shape[0]), "only of the usual ones"
    assert _private._assumptions(carriers)
