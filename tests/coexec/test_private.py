"""What coexec takes for granted of the private parts of PyTorch: a new release fails here first."""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coexec import _private, _private_inductor
from coexec._native import core
from coexec.block_watch import BlockWatch
from coexec.tracegraph.calls import meta_of
from coexec.tracer.nodes import LEAF
from tests.coexec.harness import Twice, compare


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
    assert y.grad_fn.name() == "TwiceBackward"
    assert type(p) is torch.nn.Parameter
    assert not p.requires_grad


def test_classes_of_tensors_do_not_change_with_each_block():
    """Python 3.13 gives up caching the attributes of a class that changes often."""
    with BlockWatch(noting([])):
        inside = [dict(vars(kind)) for kind in (torch.Tensor, torch.nn.Parameter)]

    assert [dict(vars(kind)) for kind in (torch.Tensor, torch.nn.Parameter)] == inside
    assert isinstance(inside[0]["_make_subclass"], staticmethod)


def test_dynamo_compiles_what_a_stand_in_stands_for():
    with BlockWatch(noting([])):
        pass

    @torch.compile(backend="eager", fullgraph=True)
    def double(x):
        return 2 * torch.Tensor._make_subclass(torch.Tensor, x)

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))


class Seeing(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append((function, types))
        return function(*args, **(kwargs or {}))


class Numbers(torch.Tensor):
    pass


def test_what_python_dispatches_reaches_a_mode_of_the_users():
    x = torch.ones(2).as_subclass(Numbers)
    with BlockWatch(noting([])), Seeing() as mode:
        torch.nn.functional.dropout(x, p=0.0, training=False)

    assert mode.seen[0] == (torch.nn.functional.dropout, (Numbers,))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: "a" - x,
        lambda x: x // None,
        lambda x: torch.nn.functional.dropout(x, p=2.0),
        lambda x: torch.nn.functional.dropout(),
        lambda x: torch.nn.functional.dropout(x, probability=0.5),
        lambda x: torch.split(x, object()),
        lambda x: torch.einsum(x),
    ],
)
def test_a_wrong_call_of_what_python_dispatches_raises_what_it_raises_in_eager(wrong):
    def step(s, k, tape):
        with tape():
            s.log.append(torch.nn.functional.dropout(s.x, p=0.5).sum().item())
            if k % 4 == 3:
                wrong(s.x * 2)

    compare(lambda: SimpleNamespace(x=torch.ones(4), log=[]), step, 12)


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
    assert _private_inductor._assumptions(carriers) == [], "all of this is true of each size in the range"

    assert bool(first.shape[0] == second.shape[0]), "only of the usual ones"
    assert _private_inductor._assumptions(carriers)


def test_what_an_object_was_knows_what_it_has_become():
    placeholder, real = torch.zeros(2), torch.ones(3)

    _private.become(placeholder, real)  # `real` is what the placeholder was

    assert _private.successor(real) is placeholder
    assert _private.successor(placeholder) is placeholder
    assert placeholder.shape == (3,)


@pytest.mark.skipif(core is None, reason="the native core marks tensors")
def test_operations_on_marked_tensors_are_seen_above_autograd(monkeypatch):
    seen = []
    tensor = torch.ones(3, requires_grad=True)

    def handler(name, found):
        seen.append((name, found is tensor))
        core.unmark(found)

    assert core.mark(tensor)
    assert not core.mark(tensor)
    assert core.is_marked(tensor)
    before = core.handle_bypassed(handler)
    try:
        result = torch.stack([tensor * 2, torch.ones(3)]).sum() + tensor.sum()
    finally:
        core.handle_bypassed(before)
    result.backward()

    assert seen == [("aten::mul.Tensor", True)]
    assert tensor.grad.tolist() == [3.0] * 3


LIBRARY = torch.library.Library("coexec_private", "FRAGMENT")
LIBRARY.define("in_python(Tensor x) -> Tensor")
LIBRARY.impl("in_python", lambda x: x * 3, "CPU")


def test_operations_in_python_are_told_apart():
    x = torch.ones(2)
    assert _private.runs_python(torch.ops.coexec_private.in_python.default, [x])
    assert not _private.runs_python(torch.ops.aten.add.Tensor, [x, x])
    assert not _private.runs_python(torch.ops.aten.bmm.default, [x, x])  # PyTorch 2.14 has such a CUDA kernel
    assert core is None or not _private.runs_python(torch.ops.coexec.fetch.default, [x])


def test_calls_of_an_apply_are_watched_wherever_python_got_it_from():
    if _private.watch_apply is None:
        pytest.skip("it needs the native module")
    early, seen = Twice.apply, []

    def watched(function, *args, **kwargs):
        seen.append((function, args, kwargs))
        return _private.run_apply(function, *args, **kwargs)

    x = torch.ones(1, requires_grad=True)
    _private.watch_apply(watched)
    try:
        made = [early(x), Twice.apply(x), torch._C._FunctionBase.__dict__["apply"].__get__(None, Twice)(x)]
        with pytest.raises(TypeError):
            early(x, x)
    finally:
        _private.watch_apply(None)

    assert [m.grad_fn.name() for m in made] == ["TwiceBackward"] * 3
    assert seen == [(Twice, (x,), {})] * 3 + [(Twice, (x, x), {})]
    early(x)
    assert len(seen) == 4


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="PyTorch 2.14 has them")
def test_hooks_on_new_nodes_are_seen():
    assert not _private.are_nodes_hooked()
    with torch.autograd.graph.node_creation_hook(lambda node: None):
        assert _private.are_nodes_hooked()
        assert _private.transform_depth(0) == (0, True)
    assert not _private.are_nodes_hooked()


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_autograd_is_not_excluded_where_a_mode_runs_an_operation_in_python():
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return _private.run_seen(function, args, kwargs or {})

    x = torch.ones(2, requires_grad=True)
    with Seeing():
        y = torch.ops.coexec_private.in_python(x)

    y.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_modes_of_ours_are_inactive_for_a_while_and_those_of_the_user_are_not():
    calls = []

    class Ours(_private.OwnMode, TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append("ours")
            return function(*args, **(kwargs or {}))

    class Users(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append("the user's")
            return function(*args, **(kwargs or {}))

    with Ours(), Users():
        with _private.without_own_modes():
            torch.add(torch.ones(1), 1)
        inside, calls[:] = set(calls), []
        torch.add(torch.ones(1), 1)

    assert inside == {"the user's"}
    assert set(calls) == {"ours", "the user's"}


def test_nothing_is_active_in_no_context():
    made = []

    def inside(x):
        with _private.in_no_context():
            made.append((torch.ones(2) * 2).is_inference())
            made.append(_private.is_transformed(torch.ones(2) * 2))
        return (x * 2).sum()

    with torch.inference_mode():
        inside(torch.ones(2))
    torch.func.grad(inside)(torch.ones(2))

    assert made == [False] * 4


def test_autograd_functions_and_scripts_have_one_entry_each():
    assert _private.run_apply(Twice, torch.ones(2)).tolist() == [2.0, 2.0]
    # Up to PyTorch 2.13 `Function.apply` is Python code that looks for the one of C++; then it is that one.
    assert (
        _private.AUTOGRAD_FUNCTION.__dict__.get("apply", _private.AUTOGRAD_APPLY) is _private.AUTOGRAD_APPLY
    )
    assert all(callable(kind.__call__) for kind in _private.SCRIPTED)
    assert all(callable(getattr(module, name)) for module, name in _private.EXPORTS)
    assert all(callable(getattr(module, name)) for module, name in _private.CONTROL_FLOW)


class Lines:
    """Code that is being written."""

    def __init__(self):
        self.lines = []

    def writeline(self, line):
        self.lines.append(line)

    def indent(self):
        return contextlib.nullcontext()


def compilation():
    """The definitions and linker flags of a compilation, and the regions of two loops of its code."""
    from torch._inductor import cpp_builder
    from torch._inductor.codegen import cpp

    made = cpp_builder.get_cpp_options("g++", do_link=True)
    code = Lines()
    regions = cpp.WorkSharing(code)
    for _ in range(2):
        regions.parallel(2)
    alone = regions.single()
    return made[0], made[3], sum("omp parallel" in line for line in code.lines), alone


def test_only_code_that_this_thread_compiles_calls_the_native_module():
    others = []

    with _private_inductor._calling_native(in_parts=True):
        definitions, flags, regions, alone = compilation()
        thread = threading.Thread(target=lambda: others.append(compilation()))
        thread.start()
        thread.join()
    others.append(compilation())

    assert "aoti_torch_cpu_mm_out=coexec_cpu_mm_out" in definitions
    assert "Wl,--wrap=GOMP_parallel" in flags
    assert (regions, alone) == (2, False)
    for definitions, flags, regions, alone in others:
        assert not any("coexec" in d for d in definitions)
        assert not any("wrap" in f for f in flags)
        assert (regions, alone) == (1, True)


def test_without_parts_only_the_functions_that_draw_are_others():
    with _private_inductor._calling_native(in_parts=False):
        definitions, flags, regions, _ = compilation()

    assert [d for d in definitions if "coexec" in d] == ["aoti_torch_cpu_rand=coexec_cpu_rand"]
    assert not any("wrap" in f for f in flags)
    assert regions == 1


def test_a_checkpoint_makes_a_frame_and_a_region_and_is_stopped_by_an_exception(monkeypatch):
    module, frame, region = _private.CHECKPOINTS
    assert (getattr(module, frame), getattr(module, region)) == (
        _private.CheckpointFrame,
        _private.CheckpointRegion,
    )
    made, ended = [], []

    class Region(_private.CheckpointRegion):
        def __init__(self, its):
            super().__init__(its)
            made.append(its)

    def layer(x):
        try:
            return x.exp().tanh()
        except _private.StopRecomputing:
            ended.append("stopped")
            raise

    monkeypatch.setattr(module, region, Region)
    weight = torch.ones(3, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(layer, weight, use_reentrant=False).sum()
    assert [type(m) for m in made] == [_private.CheckpointFrame]
    assert callable(made[0].recompute_fn)
    assert made[0].early_stop
    loss.backward()
    assert ended == ["stopped"]


def test_hooks_that_save_tensors_are_found_and_told_apart():
    assert _private.top_saving_hooks() is None
    pack, unpack = (lambda t: t), (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _private.top_saving_hooks() == (pack, unpack)
        assert _private.transform_depth(0) == (0, True)
        _private.own_hooks.add(pack)
        assert _private.transform_depth(0) == (0, False)


def test_autograd_does_not_reuse_a_gradient_while_another_object_of_it_is_held():
    weight = torch.ones(3, requires_grad=True)
    held = []
    weight.register_hook(lambda g: held.append(_private.another_object(g)))
    (weight * 2).sum().backward()
    weight.grad.zero_()
    assert held[0].tolist() == [2, 2, 2]


def test_a_node_asks_for_attributes_that_it_does_not_have():
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    _private.give_attributes(Plain, lambda node, name: f"the {name}")
    assert Plain.apply(torch.ones(1, requires_grad=True)).grad_fn.color == "the color"


def test_a_mode_that_answers_a_call_can_be_entered_again():
    seen = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            if function is torch.add:
                with _private.entered_again(self):
                    torch.mul(1, torch.ones(1))
            return function(*args, **(kwargs or {}))

    with Sees():
        torch.add(torch.zeros(1), 1)
    assert [s for s in seen if s in ("add", "mul")] == ["add", "mul"]


def test_the_engine_that_autograd_uses_is_found_in_a_class():
    asked = []

    class Engine:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(engine, name)

    engine = torch.autograd.Variable._execution_engine
    torch.autograd.Variable._execution_engine = Engine()
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    finally:
        torch.autograd.Variable._execution_engine = engine
    assert asked == ["run_backward"]


def test_the_next_autograd_node_has_the_next_sequence_number():
    x = torch.ones(2, requires_grad=True)
    first = _private.next_sequence_number()

    y = (x * 2).exp()

    assert y.grad_fn._sequence_nr() == first + 1
    assert y.grad_fn.next_functions[0][0]._sequence_nr() == first
    assert _private.next_sequence_number() == first + 2


def test_hooks_of_autograd_nodes_see_what_goes_in_and_out_and_leaves_come_when_all_has_run():
    x = torch.ones(2, requires_grad=True)
    y = (x * 2 + x).sum()
    add = y.grad_fn.next_functions[0][0]
    multiply, leaf = (node for node, _ in add.next_functions)
    seen = []
    for node in (y.grad_fn, add, multiply, leaf):
        name = node.name()
        node.register_prehook(lambda gradients, name=name: seen.append((name, gradients[0].tolist())))
        if node is not leaf:
            node.register_hook(lambda given, taken, name=name: seen.append((name, len(given))))

    y.backward()

    assert [n for n, _ in seen] == ["SumBackward0"] * 2 + ["AddBackward0"] * 2 + ["MulBackward0"] * 2 + [LEAF]
    assert seen[3] == ("AddBackward0", 2)
    assert seen[-1] == (LEAF, [3.0, 3.0])
