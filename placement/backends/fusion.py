"""The fusion rule that the CPU graph compilers share: a heavy operation with what may follow it.

oneDNN, ONNX Runtime, OpenVINO and Inductor fuse normalisation and elementwise operations into the
convolution or matrix product before them, and chains of elementwise operations into one.
"""

from __future__ import annotations

from typing import ClassVar

from placement.patterns.rules import PatternRule, Site, check_path

ELEMENTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "pow",
        "square",
        "reciprocal",
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
        "elu",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "erf",
        "softplus",
        "mish",
        "relu6",
        "threshold_backward",
        "gelu_backward",
        "tanh_backward",
        "sigmoid_backward",
        "silu_backward",
        "masked_fill",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_not",
        "logical_and",
        "logical_or",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "batch_norm",
        "dropout",
        "to",
    ]
)
"""One output element from the input elements of the same position (and per-channel constants)."""
VIEWS = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "t",
        "flatten",
        "slice",
        "select",
        "clone",
    ]
)
"""Rearrangement without arithmetic."""
REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "softmax",
        "_softmax",
        "layer_norm",
        "native_layer_norm",
        "group_norm",
        "var_mean",
    ]
)
CONVOLUTIONS = frozenset(
    ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"]
)
MATMULS = frozenset(["linear", "matmul", "mm", "bmm", "addmm", "baddbmm"])
HEAVY = CONVOLUTIONS | MATMULS | {"scaled_dot_product_attention"}
POOLS = frozenset(
    [
        "max_pool2d",
        "avg_pool2d",
        "max_pool3d",
        "avg_pool3d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "max_pool2d_with_indices",
    ]
)
OTHERS = frozenset(["cat", "embedding", "constant_pad_nd", "pad", "split", "chunk", "stack"])

LIGHT_KIND, REDUCTION_KIND, HEAVY_KIND = 1, 2, 3


class FuseIntoHeavy(PatternRule):
    """A heavy operation or reduction and the elementwise operations behind it; elementwise chains."""

    max_ops: int = 6
    operations: ClassVar[frozenset[str]] = ELEMENTWISE | VIEWS | REDUCTIONS | HEAVY | POOLS | OTHERS
    """What the backend has kernels for."""
    fusable: ClassVar[frozenset[str]] = ELEMENTWISE
    """What may follow in the same kernel."""

    def op_rule(self, node: Site) -> int:
        """The kind of an operation that the backend has, 0 for others."""
        if node.name not in self.operations or not node.op.spec.dtype.is_floating_point:
            return 0
        if node.name in HEAVY:
            return HEAVY_KIND
        return REDUCTION_KIND if node.name in REDUCTIONS else LIGHT_KIND

    def fusion_rule(self, kind: int, source: Site, sink: Site) -> bool:
        """Elementwise operations join what comes before them."""
        return source.name not in VIEWS and check_path(source, sink, lambda n: n.name in self.fusable)


class FuseChains(FuseIntoHeavy):
    """The same with reductions and views inside: for compilers that generate the loops themselves."""

    max_ops: int = 8
    fusable: ClassVar[frozenset[str]] = ELEMENTWISE | REDUCTIONS | VIEWS
