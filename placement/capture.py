"""A model, an exported program or an FX graph -> an OpGraph of functional ATen operations.

Weights and buffers become constants of the graph (`get_attr` nodes); shapes are the examples' shapes.
Operations stay as large as users write them (`conv2d`, `linear`, `layer_norm`), since that is what
backends have kernels for; each backend decomposes further what it wants to.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from placement._private import fake_mode
from placement.errors import CaptureError
from placement.graph import OpGraph, TensorSpec

aten = torch.ops.aten


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and how its flat inputs and outputs are nested."""

    graph: OpGraph
    inputs: tuple[TensorSpec, ...]
    flatten: Callable[..., list[torch.Tensor]]
    """From the module's arguments to the graph's inputs."""
    unflatten: Callable[[tuple[Any, ...]], Any]
    """From the graph's outputs to what the module returns."""
    program: ExportedProgram | None = None
    """What can be saved; None if the graph was made by a compiler's front end."""
    names: tuple[str, ...] = ()
    """The names of the model's arguments, in order."""

    def fitted(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The graph's inputs in the strides that it is for; what lies so already is not copied.

        Raises:
            CaptureError: if these are not as many, of the same shapes, types and devices.
        """
        if len(tensors) != len(self.inputs):
            raise CaptureError(f"{len(tensors)} tensors were given; it is optimized for {len(self.inputs)}.")
        return [_fitted(n, t, spec) for n, (t, spec) in enumerate(zip(tensors, self.inputs, strict=True))]


def _fitted(position: int, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tensor.shape != spec.shape or tensor.dtype != spec.dtype or str(tensor.device) != spec.device:
        raise CaptureError(
            f"input {position} is {TensorSpec.of(tensor)} on {tensor.device}; it is optimized for "
            f"{spec} on {spec.device}. Optimize again for other shapes, or pad the input."
        )
    if tensor.stride() == spec.stride:
        return tensor
    laid_out = spec.lay_out(tensor)
    if 0 in spec.stride and not torch.equal(laid_out, tensor):
        raise CaptureError(
            f"input {position} was expanded when the model was optimized, and is not now: its "
            "elements differ along that dimension. Optimize again with such an input."
        )
    return laid_out


def capture(
    model: torch.nn.Module | ExportedProgram, examples: tuple[Any, ...], names: tuple[str, ...] = ()
) -> Captured:
    """Captures a model as one graph.

    Args:
        model: a module, which is exported as it is (in evaluation mode if it is), or what
            `torch.export.export` made of one.
        examples: positional arguments; their shapes are the shapes that the graph is for.
        names: the names of the arguments, if the model is an exported program.

    Raises:
        CaptureError: if the model cannot be exported as one graph, has dynamic shapes, writes to
            its own buffers, or takes no tensor.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own use of pytree
        program = model if isinstance(model, ExportedProgram) else _exported(model, examples)
        program = program.run_decompositions({})
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    mutated = [
        s.target
        for s in program.graph_signature.output_specs
        if s.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    ]
    if mutated:
        raise CaptureError(
            f"the model writes to {', '.join(map(str, mutated))} while it runs. Placement is for functions "
            "without such effects: call model.eval(), or keep that state outside of the module."
        )
    module = _with_constants(program, kinds)
    normalize(module)
    graph = OpGraph.of(module)
    inputs = tuple(TensorSpec.of(n.meta["val"]) for n in module.graph.find_nodes(op="placeholder"))
    check_static(module)
    if isinstance(model, torch.nn.Module):
        names = tuple(inspect.signature(model.forward).parameters)
    call = program.call_spec
    flatten = _Flatten(names, call.in_spec, len(inputs))

    def unflatten(outputs: tuple[Any, ...]) -> Any:
        return pytree.tree_unflatten(list(outputs), call.out_spec)

    return Captured(graph, inputs, flatten, unflatten, program, names)


@dataclass(frozen=True)
class _Flatten:
    """From a module's arguments to its tensors, in order."""

    names: tuple[str, ...]
    nesting: Any
    tensors: int

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if len(args) == self.tensors and not kwargs and all(isinstance(a, torch.Tensor) for a in args):
            return list(args)
        for name in self.names[len(args) :]:
            if name not in kwargs:
                break
            args = (*args, kwargs.pop(name))
        leaves, given = pytree.tree_flatten((args, kwargs))
        if given != self.nesting:
            raise CaptureError(
                f"the arguments are nested as {given}, but the example inputs were nested as {self.nesting}. "
                "Call it as the examples were given, or optimize again for these inputs."
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def capture_graph(module: GraphModule) -> Captured:
    """Captures a flat FX graph of functional ATen operations, whose nodes carry `meta["val"]`."""
    module = GraphModule(module, _copied(module.graph))
    normalize(module)
    check_static(module)
    inputs = tuple(TensorSpec.of(n.meta["val"]) for n in module.graph.find_nodes(op="placeholder"))
    return Captured(OpGraph.of(module), inputs, lambda *a: list(a), lambda o: o)


def _exported(model: torch.nn.Module, examples: tuple[Any, ...]) -> ExportedProgram:
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            f"placement is for torch.nn.Module, ExportedProgram or GraphModule, not {type(model).__name__}. "
            "Wrap a function in a module whose forward() calls it."
        )
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(examples)):
        raise CaptureError("the example inputs hold no tensor. Give the arguments of the model as a tuple.")
    try:
        with torch.no_grad():
            return torch.export.export(model, examples)
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot capture {type(model).__name__} as one graph: {error}\n"
            "Placement needs a model without data-dependent control flow. Where there is some, use "
            'torch.compile(model, backend="placement"), which places the graphs between.'
        ) from error


def check_static(module: GraphModule) -> None:
    """Raises a CaptureError when a shape is symbolic."""
    for node in module.graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        if any(isinstance(v, torch.Tensor) and not all(isinstance(d, int) for d in v.shape) for v in values):
            raise CaptureError(
                f"{node.name} has a dynamic shape, {tuple(values[0].shape)}. Costs are measured for fixed "
                "shapes: export without dynamic_shapes, or call torch.compile with dynamic=False."
            )


def _with_constants(program: ExportedProgram, kinds: dict[str, Any]) -> GraphModule:
    """The program's graph with parameters, buffers and constants as attributes of its module."""
    source = program.graph
    graph = Graph()
    attributes: dict[str, Any] = {}
    made: dict[str, Node] = {}
    env: dict[Node, Node] = {}
    for node in source.nodes:
        spec = kinds.get(node.name)
        if node.op == "placeholder" and spec is not None and spec.kind != InputKind.USER_INPUT:
            value = program.state_dict.get(spec.target, program.constants.get(spec.target))
            if not isinstance(value, torch.Tensor):
                raise CaptureError(f"{spec.target} of the model is no tensor; placement cannot hold it.")
            name = f"constant_{len(attributes)}"
            attributes[name] = value.detach()
            env[node] = made.setdefault(name, graph.get_attr(name))
            env[node].meta["val"] = value.detach()
        elif node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # a number, which the export has put into the graph
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = {"val": node.meta.get("val")}
    return GraphModule(attributes, graph)


def _copied(source: Graph) -> Graph:
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in source.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = {"val": node.meta.get("val")}
    return graph


def normalize(module: GraphModule) -> None:
    """Brings equal things to one form, in place: values and layouts stay what they are.

    Batch normalisation with fixed statistics becomes `batch_norm`, copies that change nothing and
    aliases go, unused operations go, operations on constants alone are computed.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._native_batch_norm_legit_no_training.default:
            _plain_batch_norm(graph, node)
        elif node.target in _COPIES and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    _fold_constants(module)
    graph.lint()
    module.recompile()


_COPIES = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    aten.contiguous.default,
)


def _is_identity(node: Node) -> bool:
    source = node.args[0]
    if not isinstance(source, Node) or source.op == "placeholder":
        return False  # what the graph returns must not be what it was given
    if TensorSpec.of(source.meta["val"]) != TensorSpec.of(node.meta["val"]):
        return False
    returned = any(u.op == "output" for u in node.users)
    return not returned or (not _is_view(source) and not any(u.op == "output" for u in source.users))


def _is_view(node: Node) -> bool:
    """Whether a node's tensor may share memory with what it was made from."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _plain_batch_norm(graph: Graph, node: Node) -> None:
    items = {user.args[1]: user for user in node.users}
    if set(items) != {0}:
        return
    x, weight, bias, mean, variance, momentum, eps = node.args
    with graph.inserting_before(node):
        plain = graph.call_function(
            aten.batch_norm.default, (x, weight, bias, mean, variance, False, momentum, eps, True)
        )
    plain.meta["val"] = items[0].meta["val"]
    items[0].replace_all_uses_with(plain)


def _fold_constants(module: GraphModule) -> None:
    """Computes what depends on constants alone, unless that makes it larger than what it reads."""
    graph = module.graph
    known = {n: getattr(module, n.target) for n in graph.find_nodes(op="get_attr")}
    with torch.no_grad():
        for node in list(graph.nodes):
            reads = node.all_input_nodes
            if node.op != "call_function" or not reads or any(n not in known for n in reads):
                continue
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                continue
            args, kwargs = pytree.tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
            known[node] = node.target(*args, **kwargs)
    counter = len(dict(module.named_buffers()))
    for node, value in known.items():
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if all(user in known for user in node.users):
            continue
        name = f"constant_{counter}"
        counter += 1
        module.register_buffer(name, value)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta["val"] = value
        node.replace_all_uses_with(constant)
    graph.eliminate_dead_code()
    _drop_unused(module)


def _drop_unused(module: GraphModule) -> None:
    used = {n.target for n in module.graph.find_nodes(op="get_attr")}
    for name, _ in list(module.named_buffers()):
        if name not in used:
            delattr(module, name)


def without_values(spec: TensorSpec) -> torch.Tensor:
    """A tensor of a spec that has no memory, for the `meta["val"]` of a graph's nodes."""
    with fake_mode():
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
