"""How torch functions are treated when Python calls them inside of a block.

In:  the function that `__torch_function__` received.
Out: sets of functions; what is in none of them computes tensors and becomes an event.

Everything here is a statement about PyTorch's own functions, so it is data.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from coexec.tracegraph.callbacks import go_on
from coexec.tracegraph.calls import generators_in
from coexec.tracegraph.optimizers import counts_of

Tensor = torch.Tensor


def _getters(*names: str) -> set[Callable[..., Any]]:
    return {getattr(Tensor, n).__get__ for n in names if hasattr(Tensor, n)}


def _methods(*names: str) -> set[Callable[..., Any]]:
    return {getattr(Tensor, n) for n in names if hasattr(Tensor, n)}


def _functions(*names: str) -> set[Callable[..., Any]]:
    return {getattr(torch, n) for n in names if hasattr(torch, n)}


def _is_getset(name: str) -> bool:
    return type(getattr(Tensor, name, None)).__name__ == "getset_descriptor"


#: Answered from metadata: they neither read values nor change anything.
PASSIVE: frozenset[Callable[..., Any]] = frozenset(
    _getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "itemsize", "nbytes")
    | _getters("is_cpu", "is_cuda", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized")
    | _getters("is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "is_ipu", "is_maia", "names")
    | _getters("_backward_hooks", "_post_accumulate_grad_hooks", "output_nr")
    | _methods("dim", "ndimension", "size", "stride", "numel", "nelement", "element_size")
    | _methods("is_contiguous", "is_floating_point", "is_complex", "is_signed")
    | _methods("__len__", "is_inference", "get_device", "has_names", "is_distributed", "is_same_size")
    | _functions("is_floating_point", "is_complex", "numel", "is_inference", "is_signed")
    | _functions("get_device", "is_same_size", "result_type", "device")
)

#: Change or bracket the state around events; the state itself is part of every event's key.
AMBIENT: frozenset[Callable[..., Any]] = frozenset({torch._C._set_grad_enabled})

#: Operators that mark a tensor which was made of Python data just now; they change nothing.
MARKS: frozenset[Callable[..., Any]] = frozenset(
    {torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh.default}
)

#: Namespaces of operators that only annotate (profiler ranges).
ANNOTATING_NAMESPACES = ("profiler",)

#: The operators of `torch.profiler.record_function`, which optimizers enter in every step.
ANNOTATIONS: frozenset[Callable[..., Any]] = frozenset(
    function
    for packet in (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit)
    for function in (packet, *(getattr(packet, overload) for overload in packet.overloads()))
)

#: Look at values: their arguments are fetched and the function is called on them.
FETCH: frozenset[Callable[..., Any]] = frozenset(
    _methods("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__")
    | _methods("__index__", "__repr__", "__format__", "__contains__", "equal", "allclose", "is_nonzero")
    | _functions("equal", "allclose", "is_nonzero")
    | {counts_of}
)

#: Give Python a view of the memory itself, through which it could write.
SHARES_MEMORY: frozenset[Callable[..., Any]] = frozenset(_methods("numpy", "__array__"))

#: Make tensors of Python data: Python runs them itself, their results are external tensors.
DATA: frozenset[Callable[..., Any]] = frozenset(
    _functions(
        "tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor", "sparse_coo_tensor"
    )
)

#: Members of `DATA` that may return their argument itself.
MAYBE_SAME: frozenset[Callable[..., Any]] = frozenset(_functions("as_tensor", "asarray"))

#: Run the backward pass, so they depend on the whole path before them.
BACKWARD: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.backward, torch.autograd.backward, torch.autograd.grad, go_on}
)


def named_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments of a call by their names."""
    return _signature(function).bind(*args, **kwargs).arguments


_signature = functools.cache(inspect.signature)


def runs_all(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call runs the backward pass of one tensor, to all leaves that it depends on."""
    if function not in (Tensor.backward, torch.autograd.backward):
        return False
    try:
        given = named_arguments(function, args, kwargs)
    except TypeError:
        return False  # the call will say so
    tensors = given.get("tensors")
    one = not isinstance(tensors, (list, tuple)) or len(tensors) == 1
    return one and not given.get("create_graph") and given.get("inputs") is None


IS_LEAF: Callable[..., Any] = Tensor.is_leaf.__get__  # type: ignore[attr-defined]  # a getset descriptor
_GRAD: Any = Tensor.grad  # getset descriptors, which are typed as what they get
_GRAD_FN: Any = Tensor.grad_fn
GET_GRAD = _GRAD.__get__
SET_GRAD = _GRAD.__set__
DELETE_GRAD = _GRAD.__delete__
GET_GRAD_FN = _GRAD_FN.__get__

#: Setters that events can describe; all other setters change what no event shows.
_SETTERS = ("grad", "data", "requires_grad")

#: Registers a hook; on a tensor that the block computes, that is an event.
REGISTER_HOOK: Callable[..., Any] = Tensor.register_hook

#: Change or show something of a tensor that is neither value nor metadata.
UNSUPPORTED: frozenset[Callable[..., Any]] = frozenset(
    {getattr(Tensor, n).__set__ for n in dir(Tensor) if n not in _SETTERS and _is_getset(n)}
    | _methods("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "share_memory_")
    | _methods("tensor_split")
    | _functions("tensor_split")  # may read indices without an operation
    | _methods("apply_", "map_", "map2_", "__setstate__", "__reduce_ex__", "resize_", "resize_as_", "set_")
)

#: Names of functions that take a tensor for its shape, type or device only.
LOOK_AT_METADATA: frozenset[str] = frozenset(
    {"view_as", "reshape_as", "expand_as", "type_as", "to", "type", "sum_to_size", "broadcast_tensors"}
    | {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "__get__"}
    | {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
    | {"result_type", "can_cast", "promote_types", "contiguous", "__len__"}
)

#: Take indices, which may be lists of Python numbers.
INDEXING: frozenset[Callable[..., Any]] = frozenset(_methods("__getitem__", "__setitem__"))

#: Keyword arguments that are numbers: of a tensor in their place, PyTorch takes the value.
_NUMBERS: dict[Callable[..., Any], tuple[str, ...]] = {
    function: keywords
    for names, keywords in (
        (("add", "sub", "subtract", "rsub"), ("alpha",)),
        (("addmm", "addbmm", "baddbmm", "addmv", "addr"), ("alpha", "beta")),
        (("addcmul", "addcdiv"), ("value",)),
    )
    for name in names
    for function in _functions(name) | _methods(name, f"{name}_")
}

#: Say whether a leaf takes part in autograd; for an external tensor Python does it itself.
SET_REQUIRES_GRAD: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.requires_grad_, getattr(Tensor, "requires_grad").__set__}  # noqa: B009  # a getset descriptor
)

#: Write to arguments although their schema does not say so: positions, and when they do.
HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], Callable[[tuple[Any, ...]], bool]]] = {
    "aten::native_batch_norm": ((3, 4), lambda args: bool(args[5])),
    "aten::cudnn_batch_norm": ((3, 4), lambda args: bool(args[5])),
    "aten::miopen_batch_norm": ((3, 4), lambda args: bool(args[5])),
    "aten::batch_norm_update_stats": ((1, 2), lambda args: True),
    "aten::batch_norm_gather_stats": ((3, 4), lambda args: True),
    "aten::batch_norm_gather_stats_with_counts": ((3, 4), lambda args: True),
}


def is_annotation(function: Callable[..., Any]) -> bool:
    """Whether a function is an operator that only annotates, as profiler ranges do."""
    return getattr(function, "__module__", None) == "torch._ops.profiler"


def is_data(function: Callable[..., Any], tensors: Sequence[Tensor], key: Hashable) -> bool:
    """Whether a call makes a tensor of nothing but Python data, or of a generator that Python holds.

    Python makes such calls itself: what a generator draws is then in order with what Python does to it.
    """
    own = [g for g in generators_in(key) if g is not torch.default_generator]
    return not tensors and (function in DATA or bool(own))


def with_numbers(
    function: Callable[..., Any], kwargs: dict[str, Any], item: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """The keyword arguments of a call with numbers in place of tensors whose values PyTorch looks at.

    Args:
        function: what is called.
        kwargs: its keyword arguments.
        item: looks at the value of a tensor.
    """
    for name in _NUMBERS.get(function, ()):
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
            kwargs = {**kwargs, name: item(value)}
    return kwargs


def with_index_tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an indexing call with tensors in place of lists and arrays of numbers.

    What is in these is data, as a batch is: it varies without making another program.
    """
    index = args[1]
    if _holds_numbers(index):
        return (args[0], _index_tensor(index), *args[2:])
    if isinstance(index, tuple) and any(map(_holds_numbers, index)):
        return (args[0], tuple(_index_tensor(i) if _holds_numbers(i) else i for i in index), *args[2:])
    return args


def _holds_numbers(value: Any) -> bool:
    if value.__class__ is np.ndarray:  # of more dimensions it is a tuple of indices
        return bool(value.ndim == 1 and value.size and value.strides[0] > 0 and value.dtype.kind in "ib")
    return value.__class__ is list and bool(value) and all(v.__class__ is int for v in value)


def _index_tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.bool if getattr(value, "dtype", None) == np.bool_ else torch.int64)


def fetches(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call looks at the values of its tensor arguments."""
    if function in FETCH:
        return True
    return function in DATA and not (function in MAYBE_SAME and isinstance(args[0], Tensor))


def name_of(function: Callable[..., Any]) -> str:
    """The function as a user would write it: `Tensor.add_`, `nn.functional.linear`, `Tensor.T`."""
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        suffix = {"__get__": "", "__set__": " =", "__delete__": " (del)"}[name]
        return f"Tensor.{owner.__name__}{suffix}"
    qualified = getattr(function, "__qualname__", name)
    if qualified.startswith(("TensorBase.", "Tensor.")):
        return f"Tensor.{name}"
    module = getattr(function, "__module__", None) or "torch"
    module = module.removeprefix("torch._C._").removeprefix("torch._C.").removeprefix("torch.")
    if module in ("torch", "_VariableFunctionsClass") or qualified.startswith("_VariableFunctionsClass"):
        return f"torch.{name}"
    return f"{module}.{name}"
