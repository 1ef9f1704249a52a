"""The rules of traces, TraceGraphs and programs.

In:  a structure.
Out: nothing, or a `VerificationError` that names the rule, the place, and the structure.

Tests call these after each pass; `check=True` calls them after each pass at run time.
"""

from __future__ import annotations

from typing import Any, NoReturn

from coexec.errors import VerificationError
from coexec.tracegraph.cases import assign_cases
from coexec.tracegraph.graph import END, START, Captured, Fed, TraceGraph, varying_captures
from coexec.tracegraph.instructions import at_commit, reads, writes
from coexec.tracegraph.program import Commit, Jump, Move, Program, Switch
from coexec.tracegraph.sizes import varies
from coexec.tracegraph.trace import Computed, External, Input, Kind, Local, Produced, TensorMeta, Trace


def _broken(rule: str, place: object) -> NoReturn:
    raise VerificationError(f"{rule} ({place})")


def verify_trace(trace: Trace) -> None:
    """Events read only what came before them; operations only what their event has."""
    for index, event in enumerate(trace.events):
        place = f"event {index}, {event.name}"
        for binding in event.inputs:
            if isinstance(binding, Produced) and not binding.event < index:
                _broken("an event's input is produced before it", place)
            if isinstance(binding, Produced) and binding.output >= len(trace.events[binding.event].outputs):
                _broken("an event's input is an output of the event that it names", place)
            if isinstance(binding, External) and binding.index >= len(trace.externals):
                _broken("an event's input is an external tensor of the trace", place)
        for source in event.sources:
            if isinstance(source, Computed):
                if not source.event < index:
                    _broken("a source is computed by an earlier event", place)
                if trace.events[source.event].operations[source.operation].results[source.result] is None:
                    _broken("a source is a new result of its operation", place)
        if len(event.implicit_metas) > len(event.inputs):
            _broken("implicit inputs are inputs", place)
        if event.kind is Kind.FETCH and (event.operations or event.outputs):
            _broken("a fetch computes nothing", place)
        for number, operation in enumerate(event.operations):
            for value in _values(operation.args):
                if isinstance(value, Input) and value.index >= len(event.sources):
                    _broken("an operation reads sources of its event", f"{place}, operation {number}")
                if isinstance(value, Local) and not value.operation < number:
                    _broken("an operation reads earlier operations", f"{place}, operation {number}")
            if not set(operation.writes) <= set(_values(operation.args)):
                _broken("an operation writes only to its arguments", f"{place}, operation {number}")
        for grad in event.grads:
            if grad.leaf >= len(event.inputs) or grad.output >= len(event.outputs):
                _broken("a gradient belongs to an input and is an output", place)


def verify_graph(graph: TraceGraph) -> None:
    """A TraceGraph is acyclic, connected from start to end, and reads only what may have run before."""
    import networkx as nx  # not above: see `order`

    edges = nx.DiGraph((s, t) for s, targets in graph.edges.items() for t in targets)
    edges.add_nodes_from((START, END))
    if not nx.is_directed_acyclic_graph(edges):
        _broken("a TraceGraph has no cycles", nx.find_cycle(edges))
    if edges.in_degree(START) or edges.out_degree(END):
        _broken("start is the only source and end the only sink", "start, end")
    for index, node in enumerate(graph.nodes):
        if node.id != index:
            _broken("a node's id is its position", f"node {index}")
        if not node.alternatives:
            continue  # not part of the live graph
        if node.id not in edges or not (
            nx.has_path(edges, START, node.id) and nx.has_path(edges, node.id, END)
        ):
            _broken("every node is on a path from start to end", f"node {index}")
        if any(t != END and t <= node.id for t in graph.edges[node.id]):
            _broken("ids are a topological order", f"node {index}")
        if len({(a.bindings, a.path) for a in node.alternatives}) != len(node.alternatives):
            _broken("alternatives of a node differ", f"node {index}")
        for alternative in node.alternatives:
            named = {b.event for b in alternative.bindings if isinstance(b, Produced)}
            named |= {b.node for b in alternative.bindings if isinstance(b, Fed) and b.node != node.id}
            named |= {s.event for s in alternative.sources if isinstance(s, (Computed, Produced))}
            late = [n for n in named if not (n < node.id and nx.has_path(edges, n, node.id))]
            if late:
                _broken("a node reads nodes on a path before it", f"node {index} reads {late}")
            captured = [b.index for b in alternative.bindings if isinstance(b, Captured)]
            if any(c >= len(graph.captured) for c in captured):
                _broken("a captured tensor is one of the graph's", f"node {index}")
    if varying := varying_captures(graph):
        _broken("a captured tensor has the same sizes in all nodes", f"captured tensors {varying}")


def verify_program(graph: TraceGraph, program: Program) -> None:
    """A program reads registers after they are written, jumps forward, and commits once, at its end."""
    instructions = program.instructions
    if not instructions or not isinstance(instructions[-1], Commit):
        _broken("the last instruction is the commit", len(instructions) - 1)
    written = set(program.captured.values())
    released: set[int] = set()
    for position, instruction in enumerate(instructions):
        place = f"instruction {position}: {type(instruction).__name__}"
        if isinstance(instruction, Commit) and position != len(instructions) - 1:
            _broken("there is one commit", place)
        if isinstance(instruction, (Jump, Switch)):
            targets = instruction.targets if isinstance(instruction, Switch) else (instruction.target,)
            if any(not position < t < len(instructions) for t in targets):
                _broken("jumps go forward", place)
        for register in reads(instruction):
            if register not in written:
                _broken(f"register r{register} is written before it is read", place)
            if register in released and not (at_commit(instruction)):
                _broken(f"register r{register} is not read after its release", place)
        if isinstance(instruction, Move):
            for out, source in zip(instruction.outs, instruction.sources, strict=True):
                if not _may_hold(program.metas.get(out), program.metas.get(source)):
                    _broken(f"register r{out} is as large as r{source}, which is moved to it", place)
        written |= set(writes(instruction))
        released |= set(instruction.release)
        if set(instruction.release) & program.kept:
            _broken("what Python may read is not released", place)
    if not program.kept <= written:
        _broken("what Python may read is written", program.kept - written)
    switches = [i for i in instructions if isinstance(i, Switch) and i.purpose == "case"]
    multiple = [s for s in assign_cases(graph.edges) if len(s.cases) > 1]
    if len(switches) > len(multiple):
        _broken("every switch is one of the switch-cases", f"{len(switches)} switches")


def _may_hold(meta: TensorMeta | None, other: TensorMeta | None) -> bool:
    """Whether a register that is said to be like the first may hold the second: sizes may prove equal."""
    if meta is None or other is None:
        return True
    pairs = list(zip(meta.shape, other.shape, strict=False))
    return len(meta.shape) == len(other.shape) and all(a == b or varies(a) or varies(b) for a, b in pairs)


def _values(args: Any) -> list[Input | Local]:
    if isinstance(args, (Input, Local)):
        return [args]
    return [v for a in args for v in _values(a)] if isinstance(args, tuple) else []
