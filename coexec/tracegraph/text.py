"""TraceGraphs, switch-cases and programs as text, for people and for tests.

In:  a TraceGraph.
Out: one line a node. `%3` is the output of node 3, `c0` a captured tensor, `feed` a tensor that Python
     feeds there (where sizes vary with its shape, `feed[s0, 4]`), `~0.1` a number that varies; `->` lists the
     nodes that follow when that is not just the next line.

    %2 = aten.add.Tensor(%0, %1)  # train.py:41

In:  a Program.
Out: one line an instruction, behind its position. `r3` is a register.

      4  r5 = aten.mm.default(r3, r1)                                   release r3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from coexec.tracegraph.cases import SwitchCase
from coexec.tracegraph.graph import END, START, Captured, Fed, Node, NodeBinding, TraceGraph
from coexec.tracegraph.loops import Loop
from coexec.tracegraph.program import (
    Call,
    Commit,
    Compiled,
    Feed,
    Fetch,
    Instruction,
    Jump,
    Move,
    Program,
    Switch,
    When,
)
from coexec.tracegraph.rolled import Item, LoopNode, roll
from coexec.tracegraph.sizes import Size, varies
from coexec.tracegraph.trace import Kind, Produced, TensorMeta

Describe = Callable[[int], str]


def format_graph(
    graph: TraceGraph, where: Describe = lambda location: "", loops: dict[int, tuple[Loop, ...]] | None = None
) -> str:
    """A TraceGraph, loops rolled up.

    Args:
        graph: the graph.
        where: the source line of a location, empty for none.
        loops: the loops around each node; none are rolled up without it.
    """
    rolled = roll(graph, loops or {})
    lines = [f"start -> {_targets(graph.edges.get(START, ()), rolled.representative)}"]
    order = [n for item in rolled.items for n in _nodes(item)]
    follows = dict(pairwise(order))
    members: dict[int, list[int]] = {}
    for node, representative in rolled.representative.items():
        members.setdefault(representative, []).append(node)

    def emit(items: Sequence[Item], indent: str) -> None:
        for item in items:
            if isinstance(item, LoopNode):
                counts = " x" + "|".join(map(str, item.trips)) if item.trips else ""
                lines.append(f"{indent}loop {item.loop}{counts}:")
                emit(item.body, indent + "    ")
                continue
            targets = dict.fromkeys(
                rolled.representative.get(t, t) for m in members[item] for t in graph.edges.get(m, ())
            )
            lines.append(indent + _line(graph.nodes[item], rolled.representative, where))
            if list(targets) != [follows.get(item, END)]:
                lines[-1] += f"  -> {_targets(list(targets), {})}"

    emit(rolled.items, "")
    return "\n".join(lines)


def format_cases(switch_cases: Sequence[SwitchCase]) -> str:
    """Switch-cases in order, one line each; an empty case is `pass`."""
    lines = []
    for number, switch_case in enumerate(switch_cases):
        cases = []
        for case in switch_case.cases:
            block = f"%{case.block[0]}..%{case.block[-1]}" if len(case.block) > 1 else ""
            block = block or (f"%{case.block[0]}" if case.block else "pass")
            edges = ", ".join(f"{_name(a)}->{_name(b)}" for a, b in case.control_edges)
            cases.append(f"{block} if {edges}" if len(switch_case.cases) > 1 else block)
        lines.append(f"switch {number}: " + " | ".join(cases))
    return "\n".join(lines)


def format_program(program: Program) -> str:
    """A program, one instruction a line, behind the registers of its captured tensors."""
    lines = [f"     r{register} = c{index}" for index, register in program.captured.items()]
    for position, instruction in enumerate(program.instructions):
        notes = []
        if isinstance(instruction, (Call, Feed)) and instruction.when is not When.NOW:
            notes.append(instruction.when.name.lower())
        if instruction.release:
            notes.append(f"release {_registers(instruction.release)}")
        lines.append(f"{position:3}  {_instruction(instruction):62} {'; '.join(notes)}".rstrip())
    return "\n".join(lines)


def _instruction(instruction: Instruction) -> str:
    match instruction:
        case Call():
            left = f"{_registers(instruction.outs)} = " if instruction.outs else ""
            return f"{left}{instruction.target}({', '.join(map(_argument, instruction.args))})"
        case Feed():
            what = instruction.example if isinstance(instruction.example, TensorMeta) else "number"
            return f"r{instruction.out} = feed {what}"
        case Fetch():
            return f"fetch {instruction.slot}: r{instruction.source}" + (
                " copied" if instruction.copy else ""
            )
        case Move():
            pairs = zip(instruction.outs, instruction.sources, strict=True)
            return ", ".join(f"r{out} = r{source}" for out, source in pairs) or "nothing"
        case Switch():
            return f"switch {instruction.purpose}: {', '.join(map(str, instruction.targets))}"
        case Jump():
            return f"jump {instruction.target}"
        case Compiled():
            sources = ", ".join(
                [*(f"s{s}" for s in instruction.symbols), *map(_register, instruction.sources)]
            )
            return f"{_registers(instruction.outs)} = compiled({sources})"
        case Commit():
            return "commit"


def _registers(registers: Sequence[int | None]) -> str:
    return ", ".join(map(_register, registers))


def _register(register: int | None) -> str:
    return "_" if register is None else f"r{register}"


def _argument(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return "tensor" if isinstance(value, torch.Tensor) else str(value)


def _line(node: Node, representative: dict[int, int], where: Describe) -> str:
    columns = zip(
        *(a.bindings[: len(a.bindings) - len(node.implicit_metas)] for a in node.alternatives), strict=True
    )
    arguments = []
    key: Any = node.key
    for column, meta in zip(columns, key[2], strict=bool(node.alternatives)):
        shape = f"[{', '.join(map(str, meta.shape))}]" if varies(meta.shape) else ""
        names = [_binding(b, representative) + (shape if isinstance(b, Fed) else "") for b in column]
        arguments.append("|".join(dict.fromkeys(names)))
    arguments += [f"~{slot.value:.4g}" for slot in node.numbers if slot.classes is not None]
    arguments += [str(slot.value) for slot in node.numbers if isinstance(slot.value, Size)]
    place = where(node.location)
    target = "fetch " if node.kind is Kind.FETCH else f"%{node.id} = "
    return f"{target}{node.name}({', '.join(arguments)})" + (f"  # {place}" if place else "")


def _binding(binding: NodeBinding, representative: dict[int, int]) -> str:
    if isinstance(binding, Produced):
        suffix = f".{binding.output}" if binding.output else ""
        return f"%{representative.get(binding.event, binding.event)}{suffix}"
    if isinstance(binding, Captured):
        return f"c{binding.index}"
    return "feed" if isinstance(binding, Fed) else "none"


def _targets(targets: Sequence[int], representative: dict[int, int]) -> str:
    return ", ".join(dict.fromkeys(_name(representative.get(t, t)) for t in targets))


def _name(node: int) -> str:
    return {START: "start", END: "end"}.get(node, f"%{node}")


def _nodes(item: Item) -> list[int]:
    return [item] if isinstance(item, int) else [n for i in item.body for n in _nodes(i)]
