"""OpGraph, the one data structure that the rest of `placement` speaks in.

In:  an FX graph of functional ATen operations, as `capture` makes it.
Out: its operations in topological order, with the sets that the searches need as bit masks.

Bit `i` of a mask stands for `ops[i]`. An operation reads only operations of lower index. A `getitem`
on an operation with several results is no operation of its own: it belongs to the one it reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor before it exists."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake tensor."""
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))

    def lay_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor copied to these strides; along a dimension of stride 0 its first element is repeated."""
        repeated = [stride == 0 and size > 1 for size, stride in zip(self.shape, self.stride, strict=True)]
        size = [1 if again else n for n, again in zip(self.shape, repeated, strict=True)]
        first = tensor[tuple(slice(1) if again else slice(None) for again in repeated)]
        out = torch.empty_strided(size, self.stride, dtype=self.dtype, device=self.device)
        return out.copy_(first).expand(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Op:
    """One ATen operation."""

    index: int
    node: Node
    results: tuple[Node, ...]
    """The nodes that stand for its tensors: itself, or the `getitem`s of an operation with several."""

    @property
    def target(self) -> Any:
        """The ATen overload, such as `aten.add.Tensor`."""
        return self.node.target

    @property
    def name(self) -> str:
        """The short name: `add` for `aten.add.Tensor`."""
        return short_name(self.node.target)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Every argument by its schema's name, defaults filled in; tensors are nodes."""
        return bound_arguments(self.node)

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments that are tensors by the schema, in order, lists flattened; None where absent."""
        out: list[Any] = []
        for declared in self.node.target._schema.arguments:  # type: ignore[union-attr]
            if "Tensor" in str(declared.type):
                value = self.arguments[declared.name]
                out += value if isinstance(value, (list, tuple)) else [value]
        return tuple(out)

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The arguments that are not tensors by the schema."""
        return {
            declared.name: self.arguments[declared.name]
            for declared in self.node.target._schema.arguments  # type: ignore[union-attr]
            if "Tensor" not in str(declared.type)
        }

    @property
    def spec(self) -> TensorSpec:
        """The spec of its first result."""
        return spec_of(self.results[0])

    def __str__(self) -> str:
        return f"%{self.index} = {self.name} {self.spec}"


@dataclass(frozen=True, eq=False)
class OpGraph:
    """A graph of ATen operations.

    `module` is the graph with its constants; `ops` are its operations in topological order.
    """

    module: GraphModule
    ops: tuple[Op, ...]
    producer: dict[Node, int] = field(repr=False)
    """The operation that makes a node's tensor; inputs and constants have none."""
    reads: tuple[int, ...] = field(repr=False)
    """For each operation, the operations whose results it reads."""
    readers: tuple[int, ...] = field(repr=False)
    """For each operation, the operations that read its results."""
    ancestors: tuple[int, ...] = field(repr=False)
    """For each operation, those that it depends on, itself left out."""
    descendants: tuple[int, ...] = field(repr=False)
    """For each operation, those that depend on it, itself left out."""
    leaving: int = field(repr=False)
    """The operations whose results the graph returns."""
    random: int = field(repr=False)
    """The operations that draw random numbers: only ATen draws the numbers that eager draws."""

    @staticmethod
    def of(module: GraphModule) -> OpGraph:
        """The operations of an FX graph whose nodes carry `meta["val"]`."""
        groups: dict[Node, list[Node]] = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                groups[node] = []
            elif node.op == "call_function":
                groups[node.args[0]].append(node)
        ops = tuple(Op(i, n, tuple(items) or (n,)) for i, (n, items) in enumerate(groups.items()))
        producer = {n: op.index for op in ops for n in (op.node, *op.results)}
        reads: list[int] = []
        ancestors: list[int] = []
        for op in ops:
            direct = mask_of(producer[n] for n in op.node.all_input_nodes if n in producer)
            reads.append(direct)
            indirect = direct
            for i in bits(direct):
                indirect |= ancestors[i]
            ancestors.append(indirect)
        readers, descendants = [0] * len(ops), [0] * len(ops)
        for op in ops:
            for i in bits(reads[op.index]):
                readers[i] |= 1 << op.index
            for i in bits(ancestors[op.index]):
                descendants[i] |= 1 << op.index
        output = module.graph.output_node()
        leaving = mask_of(producer[n] for n in output.all_input_nodes if n in producer)
        return OpGraph(
            module,
            ops,
            producer,
            tuple(reads),
            tuple(readers),
            tuple(ancestors),
            tuple(descendants),
            leaving,
            mask_of(op.index for op in ops if torch.Tag.nondeterministic_seeded in op.target.tags),
        )

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def all(self) -> int:
        """The mask of every operation."""
        return (1 << len(self.ops)) - 1

    def members(self, mask: int) -> tuple[Op, ...]:
        """The operations of a mask, in topological order."""
        return tuple(self.ops[i] for i in bits(mask))

    def above(self, mask: int) -> int:
        """What a set of operations depends on, outside of it."""
        found = 0
        for i in bits(mask):
            found |= self.ancestors[i]
        return found & ~mask

    def below(self, mask: int) -> int:
        """What depends on a set of operations, outside of it."""
        found = 0
        for i in bits(mask):
            found |= self.descendants[i]
        return found & ~mask

    def is_convex(self, mask: int) -> bool:
        """Whether no path leaves the set and comes back: only then it can run as one."""
        return not self.above(mask) & self.below(mask)

    def is_connected(self, mask: int) -> bool:
        """Whether the set hangs together, edges taken without direction."""
        if not mask:
            return False
        found = frontier = mask & -mask
        while frontier:
            reached = 0
            for i in bits(frontier):
                reached |= self.reads[i] | self.readers[i]
            frontier = reached & mask & ~found
            found |= frontier
        return found == mask

    def sinks(self, mask: int) -> int:
        """The operations of a set whose results are used outside of it."""
        return mask_of(i for i in bits(mask) if self.readers[i] & ~mask or self.leaving >> i & 1)

    def __str__(self) -> str:
        return "\n".join(str(op) for op in self.ops)


def bits(mask: int) -> Iterator[int]:
    """The positions of the ones of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(indices: Iterable[int]) -> int:
    """The mask of some operations."""
    mask = 0
    for i in indices:
        mask |= 1 << i
    return mask


def spec_of(node: Node) -> TensorSpec:
    """What is known of a node's tensor."""
    value = node.meta["val"]
    return TensorSpec.of(value[0] if isinstance(value, (list, tuple)) else value)


def short_name(target: Any) -> str:
    """`add` for `aten.add.Tensor`; `ns::name` for operations of other libraries."""
    namespace, _, name = target._schema.name.partition("::")
    return name if namespace == "aten" else f"{namespace}::{name}"


def bound_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, with defaults."""
    out = {}
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name in node.kwargs:
            out[declared.name] = node.kwargs[declared.name]
        elif position < len(node.args) and not declared.kwarg_only:
            out[declared.name] = node.args[position]
        else:
            out[declared.name] = declared.default_value
    return out
