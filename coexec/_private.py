"""The private parts of PyTorch that coexec uses, each behind a name of its own.

`tests/coexec/test_private.py` states what each is expected to do, so that a new PyTorch release
that changes one fails there first.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch import vmap as _vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import graph as _graph
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import checkpoint as _checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._sympy.value_ranges import ValueRanges

from coexec._native import core

#: The version of PyTorch: (2, 13), for instance.
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

TORCH_DIRECTORY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

#: Files whose frames PyTorch puts between an operation and a dispatch mode.
MODE_WRAPPER_FILES = tuple(
    os.path.join(TORCH_DIRECTORY, *parts)
    for parts in (("_compile.py",), ("_dynamo", ""), ("utils", "_python_dispatch.py"))
)

#: While entered, subclasses' `__torch_function__` is not called.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass

#: The frame below which everything that runs is autograd's engine.
ENGINE_CODE = _graph._engine_run_backward.__code__


#: The sequence number that the next autograd node of this thread will have.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class OwnMode:
    """Marks the function modes and dispatch modes of coexec."""


def is_inmost() -> bool:
    """Whether a mode of coexec is the first to see torch calls, and no other the first to see operations."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    functions, operations = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    return isinstance(functions[-1], OwnMode) and (not operations or isinstance(operations[-1], OwnMode))


def operator_methods() -> list[Any]:
    """The methods behind operators on tensors, as `a + b` finds them; PyTorch calls them by other names."""
    own = vars(torch._C.TensorBase).items()
    return [method for name, method in own if name.startswith("__") and inspect.ismethoddescriptor(method)]


def is_left_alone(wrapper: Any, function: Any) -> bool:
    """Whether this is what Dynamo has put in the place of a function that it does not compile."""
    return getattr(wrapper, "_torchdynamo_disable", False) is True and inspect.unwrap(wrapper) is function


def is_profiled() -> bool:
    """Whether a profiler of PyTorch's is on."""
    profiled: bool = torch._C._autograd._profiler_enabled()
    return profiled


def make_wrapper(cls: type[torch.Tensor], meta: Any) -> torch.Tensor:
    """A tensor of class `cls` with the metadata of `meta` and no memory."""
    make: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
    return make(
        cls,
        meta.shape,
        strides=meta.stride,
        storage_offset=meta.offset,
        dtype=meta.dtype,
        device=meta.device,
        requires_grad=meta.requires_grad,
    )


def become(placeholder: torch.Tensor, real: torch.Tensor) -> None:
    """Turns the object `placeholder` into the tensor `real`, and `real` into what it was.

    Whoever holds the object holds the real tensor afterwards: class, data, autograd history.
    """
    with DisableTorchFunction():
        placeholder.__class__ = real.__class__
        torch._C._swap_tensor_impl(placeholder, real)
        if (origin := real.__dict__.pop(_ORIGIN, None)) is not None:
            placeholder.__dict__[_ORIGIN] = origin
        real._coexec_became = placeholder  # type: ignore[attr-defined]  # C++ code may hold what is `real` now
    if _hulls.kept:
        _hulls.append(real)


class _Hulls(list[torch.Tensor]):
    """What placeholders were, while C++ code that holds them by reference only may be running."""

    kept = False

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keeps those of placeholders that become something, until `forget_hulls`."""
        self.kept = True
        try:
            yield
        finally:
            self.kept = False


_hulls = _Hulls()
keep_hulls, forget_hulls = _hulls.keep, _hulls.clear


def successor(tensor: torch.Tensor) -> torch.Tensor:
    """What C++ code has, as Python has it: the tensor that a placeholder has become, or the tensor itself."""
    with DisableTorchFunction():
        became: torch.Tensor = tensor.__dict__.get("_coexec_became", tensor)
        return became


def name_node(function: type[torch.autograd.Function], name: str) -> None:
    """Gives the autograd nodes that `function` makes another name."""
    function._backward_cls.__name__ = function._backward_cls.__qualname__ = name


def give_attributes(function: type[torch.autograd.Function], get: Callable[[Any, str], Any]) -> None:
    """Has the autograd nodes that `function` makes ask `get` for attributes that they do not have."""
    node: Any = function._backward_cls
    node.__getattr__ = get


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for another inside of a `torch.func` transform."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped


def enter(mode: Any) -> None:
    """Enters a function or dispatch mode without a `with` statement."""
    mode.__enter__()


def leave(mode: Any) -> None:
    """Leaves a mode that was entered by `enter`; modes are left in the opposite order."""
    mode.__exit__(None, None, None)


#: While entered, operations run below autograd, whatever the grad mode.
BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd

#: While entered, operations pass no dispatch mode.
WithoutModes: Any = torch._C._DisableTorchDispatch


def is_exposed(tensor: torch.Tensor) -> bool:
    """Whether the memory may be known to NumPy, or to something else than PyTorch."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def is_exclusive(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, and no array, shares the tensor's memory."""
    storage = tensor.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return storage.resizable() and uses <= _USES_OF_ONE


def _uses_of_one() -> int:
    alone = torch.empty(1)
    uses: int = torch._C._storage_Use_Count(alone.untyped_storage()._cdata)
    return uses


#: The references to the memory of a tensor that nothing else shares.
_USES_OF_ONE = _uses_of_one()


def alias_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory, without autograd history; an inference tensor in inference mode."""
    if core is not None and not (value.requires_grad or torch.is_inference_mode_enabled()):
        made: torch.Tensor = core.alias_of(value)
        return made
    alias = value.new_empty(0)
    with torch.no_grad():
        alias.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return alias


#: Where a tensor keeps the one whose memory it is on.
_ORIGIN = "_coexec_origin"


def another_object(tensor: torch.Tensor) -> torch.Tensor:
    """Another object on the same memory, which keeps the tensor: autograd reuses what nobody else holds."""
    alias = alias_of(tensor)
    alias.__dict__[_ORIGIN] = tensor
    return alias


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to the tensor's memory; its `cdata` names the memory while it is held."""
    return StorageWeakRef(tensor.untyped_storage())


HigherOrderOperator: Any = torch._ops.HigherOrderOperator

_KERNEL_KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def runs_python(operation: Any, arguments: Any) -> bool:
    """Whether an operation runs Python code on such arguments, as `torch.library` lets users have it."""
    if operation._defined_in_python:
        return True
    found = _kernels_of(operation).intersection(torch.library._impls)
    if not found or not all(kernel.endswith("/CUDA") for kernel in found):
        return bool(found)
    # PyTorch 2.14 itself has such kernels.
    devices = {leaf.device.type for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
    return devices != {"cpu"}


@functools.cache
def _kernels_of(operation: Any) -> frozenset[str]:
    """What `torch.library` calls the kernels of an operation."""
    name = operation.name().replace("::", "/")
    return frozenset(f"{name}/{key}" for key in _KERNEL_KEYS)


_AUTOGRAD_KEYS = (
    "AutogradFunctionality",
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradOther",
    "AutogradNestedTensor",
    "ADInplaceOrView",
)


def run_seen(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs what a dispatch mode was given, as it would have run without the mode.

    Autograd looks into an operation in Python that has no formula for it; in a mode it is excluded.
    """
    if isinstance(operation, HigherOrderOperator) or not runs_python(operation, (args, kwargs)):
        return operation(*args, **kwargs)
    name = operation.name()
    if any(_C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("AutogradCPU", "AutogradCUDA")):
        return operation(*args, **kwargs)
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(_C.DispatchKey, key))
    with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
        return operation(*args, **kwargs)


def has_setup_context(function: type[torch.autograd.Function]) -> bool:
    """Whether a custom function fills its `ctx` in a method of its own."""
    return bool(torch.autograd.function._is_setup_context_defined(function.setup_context))


#: Modules that ask `torch.overrides.has_torch_function` before they choose a kernel.
CHOOSING_KERNELS = frozenset({torch.nn.modules.activation.__name__, torch.nn.modules.transformer.__name__})

#: Calls without the function mode that is entered last.
without_inmost_mode: Callable[[], AbstractContextManager[Any]] = torch.overrides._pop_mode_temporarily

#: The attribute of a function with what Dynamo compiles in its place.
DYNAMO_INLINES = "_torchdynamo_inline"

#: Modules whose functions call `handle_torch_function` when a mode is active.
DISPATCHING: tuple[Any, ...] = (torch.functional, torch.nn.functional, torch._tensor, torch.autograd)

#: What PyTorch makes for a checkpoint, the region in which it saves nothing, and where it finds them.
CHECKPOINTS: tuple[Any, str, str] = (_checkpoint, "_CheckpointFrame", "_checkpoint_hook")
CheckpointFrame: Any = getattr(_checkpoint, "_CheckpointFrame", object)
CheckpointRegion: Any = getattr(_checkpoint, "_checkpoint_hook", object)


class _NotStopped(Exception):
    """Is raised by nobody."""


#: How PyTorch stops the function of a checkpoint when it runs again.
StopRecomputing: type[Exception] = getattr(_checkpoint, "_StopRecomputationError", _NotStopped)

#: Whether a frame saves its inputs by itself; where it does not, checkpoints are left to PyTorch.
FRAMES_SAVE_INPUTS = hasattr(CheckpointFrame, "save_inputs")


def top_saving_hooks() -> tuple[Any, Any] | None:
    """The functions that pack and unpack what autograd saves, if there are any."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


#: Packing functions that events show.
own_hooks: weakref.WeakSet[Any] = weakref.WeakSet()


def _node_hooks() -> Callable[[], bool]:
    if core is not None:
        return core.are_nodes_hooked  # type: ignore[no-any-return]
    library = ctypes.PyDLL(torch._C.__file__)
    are_none = getattr(library, "_ZN2at4impl17NodeCreationHooks5emptyEv", None)
    if are_none is None:
        return lambda: False
    are_none.restype = ctypes.c_bool
    return lambda: not are_none()


#: Whether `torch.autograd.graph.node_creation_hook` is active, which PyTorch has from 2.14 on.
are_nodes_hooked = _node_hooks()

#: The `apply` of autograd functions that is C++ code, and the class where functions find it, or would.
AUTOGRAD_APPLY: Any = torch._C._FunctionBase.__dict__["apply"]
_APPLIES_IN_CPP = torch.autograd.Function.__dict__["apply"] is AUTOGRAD_APPLY  # from PyTorch 2.14 on
AUTOGRAD_FUNCTION: Any = (
    torch.autograd.Function if _APPLIES_IN_CPP else torch.autograd.function._SingleLevelFunction
)

#: Has a function called in the place of that `apply`, wherever Python got it from; None if nothing can.
watch_apply: Callable[[Any], None] | None = getattr(core, "watch_apply", None)


def run_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls that `apply`, whoever watches it."""
    if watch_apply is not None:
        return core.apply(function, *args, **kwargs)
    return AUTOGRAD_APPLY.__get__(None, function)(*args, **kwargs)


def arguments_of_forward(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """What `forward` gets where that `apply` is called; None where it is not what `forward` is called by."""
    if not _APPLIES_IN_CPP or not issubclass(function, torch.autograd.Function):
        return None if kwargs else args
    if torch._C._are_functorch_transforms_active():
        return None
    if has_setup_context(function):
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    unwrapped: tuple[Any, ...] = torch._functorch.utils.unwrap_dead_wrappers(args)
    return None if kwargs else unwrapped


#: Where the function is that exports memory and passes no torch function.
EXPORTS: tuple[Any, ...] = ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"))

#: The operators for control flow, which have Dynamo compile the functions that they are given.
CONTROL_FLOW: tuple[Any, ...] = (
    (torch, "cond"),
    *(
        (torch._higher_order_ops, name)
        for name in ("cond", "while_loop", "scan", "associative_scan", "map")
        if callable(getattr(torch._higher_order_ops, name, None))
    ),
)

#: The functions of TorchScript.
SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)

#: Where the transforms of `torch.func` begin: modules, and the functions that they call first.
TRANSFORM_ENTRIES = tuple(
    (module, name)
    for module, name in (
        (_vmap, "_vmap_increment_nesting"),
        (_eager_transforms, "_grad_increment_nesting"),
        (_eager_transforms, "_jvp_increment_nesting"),
        (_eager_transforms, "_func_increment_nesting"),
    )
    if hasattr(module, name)
)


def transform_depth(own_modes: int) -> tuple[int, bool]:
    """Dispatch modes and functorch levels that are active, and whether hooks see what autograd does."""
    depth: int = torch._C._len_torch_dispatch_stack() - own_modes
    level: int = torch._C._functorch.maybe_current_level() or 0
    hooks = top_saving_hooks()
    packing = hooks is not None and hooks[0] not in own_hooks
    return depth * 1000 + level, packing or are_nodes_hooked()


@contextmanager
def without_own_modes() -> Iterator[None]:
    """A context in which modes of coexec are not active, for Dynamo to look into the others."""
    stack = list(_get_current_function_mode_stack())
    for _ in stack:
        _pop_mode()
    for mode in stack:
        if not isinstance(mode, OwnMode):
            _push_mode(mode)
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in stack:
            if not isinstance(mode, OwnMode):
                _pop_mode()
        for mode in stack:
            _push_mode(mode)


@contextmanager
def in_no_context() -> Iterator[None]:
    """A context in which nothing is active that changes operations: what runs is not the caller's."""
    tracing = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        with (
            DisableTorchFunction(),
            _disable_current_modes(),
            torch.inference_mode(False),
            temporarily_clear_interpreter_stack(),
        ):
            yield
    finally:
        _C._set_tracing_state(tracing)


def leave_own_modes() -> None:
    """Leaves the innermost modes of this thread as long as they are coexec's, for good."""
    while (stack := _get_current_function_mode_stack()) and isinstance(stack[-1], OwnMode):
        _pop_mode()
    while isinstance(innermost_dispatch_mode(), OwnMode):
        _pop_dispatch_mode()


@contextmanager
def entered_again(mode: Any) -> Iterator[None]:
    """A context in which a function mode is active that is answering a call."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


@contextmanager
def entered_elsewhere(mode: Any) -> Iterator[None]:
    """A context in which a dispatch mode of another thread is active on this one."""
    _push_dispatch_mode(mode)
    try:
        yield
    finally:
        _pop_dispatch_mode()


def same_stream() -> AbstractContextManager[Any]:
    """A context in which another thread uses this thread's CUDA device and stream."""
    if not torch.cuda.is_initialized():
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream())
    return stream


def without_current_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode is active that was entered before it."""
    return _disable_current_modes()


_C: Any = torch._C


#: What has a precision of its own for float32: backends and kinds of operations.
_PRECISIONS = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("conv", "rnn", "matmul")]


def kernel_choices() -> tuple[Any, ...]:
    """The settings by which PyTorch chooses between kernels of one operation."""
    return (
        _C._get_flash_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_mkldnn_enabled(),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        *(_C._get_fp32_precision_getter(*kind) for kind in _PRECISIONS),
    )


def are_dispatch_modes_off() -> bool:
    """Whether operations of this thread pass all dispatch modes by."""
    off: bool = _C._dispatch_tls_is_dispatch_key_excluded(_C.DispatchKey.Python)
    return off


def innermost_dispatch_mode() -> Any:
    """The dispatch mode that sees an operation first, None if there is none."""
    stack = _get_current_dispatch_mode_stack()
    return stack[-1] if stack else None


def foreign_modes() -> list[str]:
    """Names of the function and dispatch modes that the user has entered."""
    modes = [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]
    return [type(m).__name__ for m in (*modes, *_get_current_dispatch_mode_stack())]


def default_device() -> str:
    """The device of `torch.set_default_device` or `with torch.device(...)`."""
    contexts = [m for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)]
    return str([str(m.device) for m in contexts])


def shapes_without_values(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> list[tuple[int, ...]] | None:
    """The shapes of the tensors that a call returns, from metadata alone; None if values are needed."""
    mode = FakeTensorMode()
    with torch.no_grad():
        fake = tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t.detach()), (tuple(args), kwargs))
        try:
            with mode:
                returned = function(*fake[0], **fake[1])
        except Exception:  # it has no fake implementation, or looks at values
            return None
    return [tuple(t.shape) for t in tree_leaves(returned) if isinstance(t, torch.Tensor)]


def symbolic_carriers(ranges: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """For each range (least, greatest, usual), a fake tensor whose only size is a symbol of that range."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    carriers: list[torch.Tensor] = []
    for low, high, usual in ranges:
        bounds = StrictMinMaxConstraint(vr=ValueRanges(low, high), warn_only=False)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[bounds])
        carriers.append(mode.from_tensor(torch.zeros(1).expand(usual), symbolic_context=context))
    return carriers


def fake_mode_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The mode in which tensors like a fake one are made."""
    assert isinstance(tensor, FakeTensor)
    mode: AbstractContextManager[Any] = tensor.fake_mode
    return mode
