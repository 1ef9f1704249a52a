"""Every private part of PyTorch that `placement` uses. Written for torch 2.11 to 2.14."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch.fx import GraphModule


def compile_frozen(
    module: Callable[..., Any], examples: Sequence[torch.Tensor], options: dict[str, Any]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compiles a function of ATen operations with TorchInductor, its constants folded in.

    `torch.compile` of each segment would check guards at every call; this is what is under it.

    Returns:
        A function from the list of inputs, which it empties, to the outputs.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner, fw_compiler_freezing
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), config.patch({"freezing": True, "freezing_discard_parameters": False, **options}):
        graph: Any = make_fx(
            module,
            decomposition_table=select_decomp_table(),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*examples)
        graph.graph.eliminate_dead_code()
        fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        compiled: Any = fw_compiler_freezing(
            graph, fakes, graph, len(fakes), compile_fx_inner, BoxedBool(False), 0, BoxedDeviceIndex(None)
        )
        return compiled  # type: ignore[no-any-return]


def pack_convolution(
    weight: torch.Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    input_shape: list[int],
) -> torch.Tensor:
    """A convolution's weight in the layout that oneDNN prefers for an input of this shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight, padding, stride, dilation, groups, input_shape
    )
    return packed


def pack_linear(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A linear layer's weight in the layout that oneDNN prefers for so many rows of input."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def convolution() -> Any:
    """Convolution with a packed weight and an activation."""
    return torch.ops.mkldnn._convolution_pointwise.default


def convolution_add() -> Any:
    """Convolution with a packed weight, a summand and an activation."""
    return torch.ops.mkldnn._convolution_pointwise.binary


def linear() -> Any:
    """Linear layer with a packed weight and an activation."""
    return torch.ops.mkldnn._linear_pointwise.default


@lru_cache(maxsize=1)
def _onnx_operators() -> Any:
    """The exporter's table of ATen operations. The public exporter reads it at each call."""
    from torch.onnx._internal.exporter import _registration

    return _registration.ONNXRegistry.from_torchlib()


def export_onnx(program: torch.export.ExportedProgram) -> bytes:
    """An exported program as an ONNX model."""
    from torch.onnx._internal.exporter import _core

    done: Any = _core.export(program, registry=_onnx_operators(), verbose=False)
    data: bytes = done.model_proto.SerializeToString()
    return data


def compile_with_autograd(
    module: GraphModule,
    examples: Sequence[Any],
    compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """What Dynamo captured, as functional ATen graphs of forward and backward, each compiled."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    def compile_flat(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # The graph was traced on fake tensors; costs are measured on real ones.
        with _disable_current_modes(), unset_fake_temporarily(), tracing(None):
            boxed: Callable[..., Any] = make_boxed_func(compiler(graph, inputs))
        return boxed

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compile_flat, bw_compiler=compile_flat)(
        module, examples
    )
    return compiled


def fake_mode() -> AbstractContextManager[Any]:
    """A context in which tensors are made without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
