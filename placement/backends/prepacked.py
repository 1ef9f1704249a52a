"""The backends aten-channels-last and aten-prepacked: PyTorch's kernels, prepared for fixed weights.

`aten-channels-last` keeps images channels-last inside of a segment. `aten-prepacked` also folds batch
normalisation into convolutions, packs weights into oneDNN's layout beforehand, and has oneDNN apply
additions and activations while it writes a result. At a segment's borders layouts are as in eager.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights

from placement import _private
from placement.backends.base import Backend, Run
from placement.backends.fusion import HEAVY, FuseIntoHeavy
from placement.graph import bound_arguments
from placement.patterns.rules import PatternRule
from placement.segments import Segment

aten = torch.ops.aten
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS = (aten.conv2d.default, aten.conv3d.default)
RELU = aten.relu.default
BATCH_NORM = aten.batch_norm.default
ADD = aten.add.Tensor


class FromHeavy(FuseIntoHeavy):
    """Groups with a convolution or matrix product in them; alone, elementwise operations gain nothing."""

    def op_rule(self, node: Any) -> int:
        """As the parent says, for what can start or continue such a group."""
        return super().op_rule(node) if node.name in HEAVY | self.fusable else 0


class ChannelsLast(Backend):
    """PyTorch's kernels on channels-last images."""

    name: ClassVar[str] = "aten-channels-last"
    level: ClassVar[Any] = "graph"
    isolate: ClassVar[bool] = False

    def rules(self) -> tuple[PatternRule, ...]:
        """Convolutions with what follows."""
        return (FromHeavy(),)

    def supports(self, segment: Segment) -> str | None:
        """It needs a convolution: nothing else has another kernel for the layout."""
        targets = {n.target for n in segment.module.graph.nodes}
        return None if targets & set(CONVOLUTIONS) else "it has no 2d or 3d convolution"

    def lower(self, segment: Segment) -> Any:
        """The module with its convolutions' inputs and weights channels-last."""
        module = _copy(segment.module)
        to_channels_last(module)
        return _ready(module)

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """Its generated Python code."""
        run: Run = lowered.forward
        return run


class Prepacked(ChannelsLast):
    """oneDNN through PyTorch with folded, packed weights and fused additions and activations."""

    name: ClassVar[str] = "aten-prepacked"

    def missing(self) -> str | None:
        """PyTorch must be built with oneDNN."""
        return None if torch.backends.mkldnn.is_available() else "this PyTorch is built without oneDNN"

    def supports(self, segment: Segment) -> str | None:
        """It needs a convolution or a linear layer with constant weights in single precision."""
        if any(_packable(n) for n in segment.module.graph.nodes):
            return None
        return "it has no convolution or linear layer with constant weights in single precision"

    def lower(self, segment: Segment) -> Any:
        """The module with its heavy operations replaced by packed ones."""
        module = _copy(segment.module)
        fold_batch_norms(module)
        to_channels_last(module)
        pack(module)
        return _ready(module)

    def version_key(self) -> str:
        """PyTorch brings its own oneDNN."""
        return f"{torch.__version__} packed 1"


def _copy(module: GraphModule) -> GraphModule:
    from torch.fx import Graph

    graph = Graph()
    env: dict[Node, Node] = {}
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    return GraphModule(dict(module.named_buffers()), graph)


def _ready(module: GraphModule) -> GraphModule:
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def _constant(module: GraphModule, value: Any) -> torch.Tensor | None:
    if isinstance(value, Node) and value.op == "get_attr":
        tensor = getattr(module, str(value.target))
        return tensor if isinstance(tensor, torch.Tensor) else None
    return None


def _add_constant(module: GraphModule, before: Node, value: torch.Tensor) -> Node:
    name = f"packed_{len(dict(module.named_buffers()))}"
    module.register_buffer(name, value)
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    node.meta["val"] = value
    return node


def _packable(node: Node) -> bool:
    if node.target not in (*CONVOLUTIONS, aten.linear.default):
        return False
    weight = bound_arguments(node)["weight"]
    value = node.meta["val"]
    return bool(weight.op == "get_attr" and value.dtype == torch.float32 and value.device.type == "cpu")


def fold_batch_norms(module: GraphModule) -> None:
    """Scales the weights of convolutions whose only reader is a batch normalisation with constants."""
    for node in list(module.graph.nodes):
        if node.target is not BATCH_NORM:
            continue
        norm = bound_arguments(node)
        conv = norm["input"]
        if conv.target not in CONVOLUTIONS or len(conv.users) != 1 or norm["training"]:
            continue
        given = bound_arguments(conv)
        weight, bias = _constant(module, given["weight"]), _constant(module, given["bias"])
        statistics = [_constant(module, norm[k]) for k in ("running_mean", "running_var", "weight", "bias")]
        if weight is None or (given["bias"] is not None and bias is None):
            continue
        mean, variance, scale, shift = statistics
        if mean is None or variance is None:  # not constants
            continue
        folded = fuse_conv_bn_weights(weight, bias, mean, variance, norm["eps"], scale, shift)
        new_weight, new_bias = (_add_constant(module, conv, t.detach()) for t in folded)
        with module.graph.inserting_before(conv):
            rest = [given[k] for k in ("stride", "padding", "dilation", "groups")]
            new = module.graph.call_function(conv.target, (given["input"], new_weight, new_bias, *rest))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        module.graph.erase_node(conv)


def to_channels_last(module: GraphModule) -> None:
    """Makes images that convolutions read, and their weights, channels-last; views become reshapes."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.view.default:
            node.target = aten.reshape.default
    for node in list(graph.nodes):
        if node.target not in CONVOLUTIONS:
            continue
        source = node.args[0]
        layout = LAYOUTS[source.meta["val"].dim()]
        if source.op == "placeholder":
            with graph.inserting_before(node):
                moved = graph.call_function(aten.contiguous.default, (source,), {"memory_format": layout})
            moved.meta = dict(source.meta)
            first = next(n for n in graph.nodes if n.op != "placeholder")
            first.prepend(moved)
            source.replace_all_uses_with(moved, delete_user_cb=lambda user, m=moved: user is not m)
        weight = _constant(module, node.args[1])
        if weight is not None and not weight.is_contiguous(memory_format=layout):
            node.update_arg(1, _add_constant(module, node, weight.contiguous(memory_format=layout)))


def pack(module: GraphModule) -> None:
    """Replaces convolutions and linear layers by oneDNN's packed ones, with what follows them fused in."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _packable(node):
            replace = _pack_linear if node.target is aten.linear.default else _pack_convolution
            replace(module, node)


def _pack_convolution(module: GraphModule, node: Node) -> None:
    given = bound_arguments(node)
    weight = _constant(module, given["weight"])
    if weight is None or isinstance(given["padding"], str):
        return
    dims = weight.dim() - 2
    stride, padding, dilation = (_per_dim(given[k], dims) for k in ("stride", "padding", "dilation"))
    shape = list(given["input"].meta["val"].shape)
    packed = _private.pack_convolution(weight, padding, stride, dilation, given["groups"], shape)
    constant = _add_constant(module, node, packed)
    settings = (constant, given["bias"], padding, stride, dilation, given["groups"])
    last, addend, activation = _epilogue(node, allow_add=True)
    args: tuple[Any, ...]
    with module.graph.inserting_before(last):
        if addend is not None:
            target = _private.convolution_add()
            args = (given["input"], addend, *settings, "add", 1.0, activation, [], None)
        else:
            target = _private.convolution()
            args = (given["input"], *settings, activation or "none", [], None)
        new = module.graph.call_function(target, args)
    _replace(module, node, last, new)


def _pack_linear(module: GraphModule, node: Node) -> None:
    given = bound_arguments(node)
    weight = _constant(module, given["weight"])
    shape = given["input"].meta["val"].shape
    if weight is None or weight.dim() != 2 or not shape.numel():
        return
    packed = _private.pack_linear(weight, shape.numel() // shape[-1])
    constant = _add_constant(module, node, packed)
    last, _, activation = _epilogue(node, allow_add=False)
    with module.graph.inserting_before(last):
        args: tuple[Any, ...] = (given["input"], constant, given["bias"], activation or "none", [], None)
        new = module.graph.call_function(_private.linear(), args)
    _replace(module, node, last, new)


def _epilogue(node: Node, *, allow_add: bool) -> tuple[Node, Node | None, str | None]:
    """The last node of `node [+ other] [activation]`, the other summand, and oneDNN's activation."""
    last, addend = node, None
    user = _only_user(last)
    if allow_add and user is not None and user.target is ADD and bound_arguments(user)["alpha"] == 1:
        left, right = user.args[:2]
        other = right if left is node else left
        if isinstance(other, Node) and other is not node and _same_shape(other, node):
            last, addend = user, other
            user = _only_user(last)
    if user is not None and user.target is RELU:
        return user, addend, "relu"
    if user is not None and addend is None and not allow_add and user.target is aten.tanh.default:
        return user, addend, "tanh"
    return last, addend, None


def _same_shape(other: Node, node: Node) -> bool:
    return bool(other.op != "get_attr" and other.meta["val"].shape == node.meta["val"].shape)


def _only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def _replace(module: GraphModule, first: Node, last: Node, new: Node) -> None:
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    node: Node = last
    while node is not first:
        above = next(n for n in node.all_input_nodes if n is first or first in n.all_input_nodes)
        module.graph.erase_node(node)
        node = above
    module.graph.erase_node(first)


def _per_dim(value: Any, dims: int) -> list[int]:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return listed * dims if len(listed) == 1 else listed
