"""Two-dimensional convolutions in the memory format channels_last, and what is between them.

In:  a functional graph of ATen operations with metadata (`val`), as TorchInductor has it before lowering.
Out: the same graph, in which convolutions and their backward passes get channels_last, and so give it.

On a CPU, TorchInductor computes convolutions in channels_last anyway. It also gives their backward passes the
strides that the program had, and of a graph with both it would convert every activation between the two.
Operations that may depend on where an element lies (random numbers are drawn in memory's order) still get the
strides of the program, and so do the graph's outputs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from coexec._private_inductor import stride_operator

aten = torch.ops.aten

#: By operation, the arguments that are in channels_last.
_CONVOLUTIONS: dict[Any, tuple[int, ...]] = {
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}
#: Besides elementwise operations, what computes the same whatever its arguments' strides are. The kernels of
#: others may rely on strides that autograd gives them.
_ANY_STRIDES = {
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward, aten._to_copy, aten.alias, aten.amax,
    aten.amin, aten.any, aten.argmax, aten.avg_pool2d, aten.avg_pool2d_backward, aten.cat, aten.clone,
    aten.constant_pad_nd, aten.copy_, aten.detach, aten.empty_like, aten.expand, aten.full_like,
    aten.gather, aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.mean,
    aten.ones_like, aten.permute, aten.prod, aten.reshape, aten.select, aten.slice, aten.slice_backward,
    aten.split, aten.split_with_sizes, aten.squeeze, aten.stack, aten.sum, aten.t, aten.transpose,
    aten.unsqueeze, aten.upsample_bilinear2d, aten.upsample_nearest2d, aten.upsample_nearest2d_backward,
    aten.var, aten.var_mean, aten.zeros_like,
}  # fmt: skip


class KeepsLayout(Exception):
    """A graph cannot be changed; the message says why."""


def to_channels_last(graph: Graph) -> None:
    """Changes a graph in place.

    Raises:
        KeepsLayout: if an operation needs strides that cannot be restored.
    """
    if not any(_converts(node) for node in graph.nodes):
        return
    original = {n: v.stride() for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    made: dict[tuple[Node, tuple[int, ...]], Node] = {}
    changed: set[Node] = set()

    def strided(node: Node, stride: tuple[int, ...], user: Node) -> Node:
        if _has_stride(_value(node), stride):
            return node
        if (node, stride) not in made:
            with graph.inserting_before(user):
                made[node, stride] = graph.call_function(stride_operator(), (node, stride))
            _propagate(made[node, stride])
        return made[node, stride]

    def restored(node: Node, user: Node) -> Node:
        if node not in changed or _has_stride(_value(node), original[node]):
            return node
        if not _is_dense(_value(node).shape, original[node]):
            raise KeepsLayout(f"{node} is not dense")
        return strided(node, original[node], user)

    for node in list(graph.nodes):
        if _converts(node):
            for argument in _CONVOLUTIONS[node.target]:
                source = node.args[argument]
                node.update_arg(argument, strided(source, _channels_last(_value(source).shape), node))
            _propagate(node)
            changed.add(node)
        elif changed.isdisjoint(node.all_input_nodes):
            continue
        elif node.op == "output" or _depends_on_memory(node) or _moves(node):
            for source in node.all_input_nodes:
                if isinstance(source.meta.get("val"), torch.Tensor):
                    node.replace_input_with(source, restored(source, node))
        else:
            _propagate(node)
            changed.add(node)


def _converts(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _CONVOLUTIONS:
        return False
    values = [_value(node.args[i]) for i in _CONVOLUTIONS[node.target]]
    return all(v.device.type == "cpu" and v.dim() == 4 and _is_static(v) and v.numel() for v in values)


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _has_stride(value: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether elements lie as with these strides."""
    return all(size == 1 or a == b for size, a, b in zip(value.shape, value.stride(), stride, strict=True))


def _channels_last(shape: torch.Size) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels)


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether each place of a stretch of memory is one element's."""
    span = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != span:
            return False
        span *= size
    return True


def _depends_on_memory(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    flexible = {torch.Tag.flexible_layout, torch.Tag.pointwise}.intersection(target.tags)
    return not flexible and target.overloadpacket not in _ANY_STRIDES


def _moves(node: Node) -> bool:
    """Whether another shape needs elements moved, which no kernel does with vectors."""
    if node.target is not aten.reshape.default:
        return False
    try:
        _value(node.args[0]).view(_value(node).shape)
    except (RuntimeError, ValueError):  # of tensors with memory, and of those without
        return True
    return False


def _value(node: Any) -> Any:
    if "val" not in node.meta:
        raise KeepsLayout(f"nothing is known of {node}")
    return node.meta["val"]


def _propagate(node: Node) -> None:
    """Brings a node's metadata up to date."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _value)
    target: Any = node.target
    with torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
