"""Each rule of the verifiers has a structure that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import coexec
from coexec.programs import all_states
from coexec.tracegraph.graph import END, START, Captured
from coexec.tracegraph.live import live
from coexec.tracegraph.program import Call, Commit, Fetch, Jump, Move, Reg, Switch, When
from coexec.tracegraph.trace import Computed, External, Grad, Input, Kind, Local, Produced
from coexec.tracegraph.verify import verify_graph, verify_program, verify_trace


@pytest.fixture
def state():
    w = torch.randn(3, requires_grad=True)
    s = torch.zeros(3)
    for k in range(5):
        with coexec.GradientTape():
            x = torch.randn(3)
            y = x * w if k % 2 else x + w
            print(y.sum().detach().item())
            y.pow(2).sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                s.add_(x)
            w.grad = None
    [state] = all_states()
    return state


def with_event(trace, index, **changes):
    events = list(trace.events)
    events[index] = replace(events[index], **changes)
    return replace(trace, events=tuple(events))


def with_node(graph, index, **changes):
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(graph, nodes=tuple(nodes))


def with_instruction(program, index, instruction):
    instructions = list(program.instructions)
    instructions[index] = instruction
    return replace(program, instructions=tuple(instructions))


def broken(rule):
    return pytest.raises(coexec.VerificationError, match=rule)


def where(items, condition):
    return next(i for i, item in enumerate(items) if condition(item))


def test_what_the_passes_make_keeps_the_rules(state):
    for trace in state.traces:
        verify_trace(trace)
    verify_graph(state.graph)
    verify_graph(live(state.graph))
    verify_program(state.skeleton.graph, state.skeleton.program)


def test_traces(state):
    trace = state.traces[0]
    operation = trace.events[1].operations[0]
    fetch = where(trace.events, lambda e: e.kind is Kind.FETCH)
    backward = where(trace.events, lambda e: e.backward)
    with broken("an event's input is produced before it"):
        verify_trace(with_event(trace, 1, inputs=(Produced(1, 0),)))
    with broken("is an output of the event that it names"):
        verify_trace(with_event(trace, 1, inputs=(Produced(0, 5),)))
    with broken("is an external tensor of the trace"):
        verify_trace(with_event(trace, 1, inputs=(External(99),)))
    with broken("a source is computed by an earlier event"):
        verify_trace(with_event(trace, 1, sources=(Computed(3, 0, 0),)))
    with broken("implicit inputs are inputs"):
        verify_trace(with_event(trace, 0, implicit_metas=(None,) * 9))
    with broken("a fetch computes nothing"):
        verify_trace(with_event(trace, fetch, operations=(operation,)))
    with broken("an operation reads sources of its event"):
        verify_trace(with_event(trace, 1, operations=(replace(operation, args=(Input(9),)),)))
    with broken("an operation reads earlier operations"):
        verify_trace(with_event(trace, 1, operations=(replace(operation, args=(Local(0, 0),)),)))
    with broken("an operation writes only to its arguments"):
        verify_trace(with_event(trace, 1, operations=(replace(operation, writes=(Local(0, 0),)),)))
    with broken("a gradient belongs to an input and is an output"):
        verify_trace(with_event(trace, backward, grads=(Grad(99, 0),)))
    in_place = next(
        (i, j) for i, e in enumerate(trace.events) for j, o in enumerate(e.operations) if None in o.results
    )
    with broken("a source is a new result of its operation"):
        verify_trace(with_event(trace, len(trace.events) - 1, sources=(Computed(*in_place, 0),)))


def test_graphs(state):
    graph = state.graph
    with broken("has no cycles"):
        verify_graph(replace(graph, edges={**graph.edges, len(graph.nodes) - 1: (END, 0)}))
    with broken("start is the only source"):
        verify_graph(replace(graph, edges={**graph.edges, 99: (START,)}))
    with broken("a node's id is its position"):
        verify_graph(with_node(graph, 1, id=0))
    with broken("every node is on a path from start to end"):
        verify_graph(replace(graph, edges={**graph.edges, START: ()}))
    swapped = {0: 1, 1: 0}
    with broken("ids are a topological order|no cycles|reads nodes on a path before it"):
        verify_graph(
            replace(
                graph,
                edges={
                    swapped.get(s, s): tuple(swapped.get(t, t) for t in targets)
                    for s, targets in graph.edges.items()
                },
            )
        )
    last = len(graph.nodes) - 1
    bindings = (Produced(last, 0),)
    with broken("a node reads nodes on a path before it"):
        alternatives = tuple(replace(a, bindings=bindings) for a in graph.nodes[0].alternatives)
        verify_graph(with_node(graph, 0, alternatives=alternatives))
    with broken("a captured tensor is one of the graph's"):
        verify_graph(replace(graph, captured=()))
    taking = where(
        graph.nodes, lambda n: any(isinstance(b, Captured) for b in n.alternatives[0].bindings[-1:])
    )
    key = graph.nodes[taking].key
    larger = (*key[2][:-1], replace(key[2][-1], shape=(7,)))
    with broken("a captured tensor has the same sizes in all nodes"):
        verify_graph(with_node(graph, taking, key=(*key[:2], larger)))


def test_programs(state):
    graph, program = state.skeleton.graph, state.skeleton.program
    instructions = program.instructions
    call = where(
        instructions,
        lambda i: isinstance(i, Call) and i.when is When.NOW and any(o is not None for o in i.outs),
    )
    jump = where(instructions, lambda i: isinstance(i, (Jump, Switch)))
    with broken("the last instruction is the commit"):
        verify_program(graph, replace(program, instructions=instructions[:-1]))
    with broken("there is one commit"):
        verify_program(graph, with_instruction(program, 0, Commit()))
    with broken("jumps go forward"):
        verify_program(graph, with_instruction(program, jump, Jump(0)))
    unwritten = program.registers + 5
    with broken(f"register r{unwritten} is written before it is read"):
        verify_program(graph, with_instruction(program, call, Fetch(0, unwritten, False, -1)))
    reader = where(instructions, lambda i: isinstance(i, Fetch))
    source = instructions[reader].source
    early = with_instruction(program, reader - 1, replace(instructions[reader - 1], release=(source,)))
    with broken("is not read after its release"):
        verify_program(graph, early)
    with broken("what Python may read is not released"):
        verify_program(
            graph, replace(program, kept=program.kept | set(instructions[reader].release or {source}))
        )
    moved = where(instructions, lambda i: isinstance(i, Move))
    [out, *_] = instructions[moved].outs
    metas = {**program.metas, out: replace(program.metas[out], shape=(7,))}
    with broken(f"register r{out} is as large as r"):
        verify_program(graph, replace(program, metas=metas))
    with broken("what Python may read is written"):
        verify_program(graph, replace(program, kept=program.kept | {unwritten}))
    with broken("every switch is one of the switch-cases"):
        extra = tuple(Switch((1 + n, 1 + n), "case") for n in range(9))
        shifted = [
            replace(i, target=i.target + 9)
            if isinstance(i, Jump)
            else replace(i, targets=tuple(t + 9 for t in i.targets))
            if isinstance(i, Switch)
            else i
            for i in instructions
        ]
        verify_program(graph, replace(program, instructions=(*extra, *shifted)))


def test_a_register_is_a_reference_in_arguments():
    assert str(Reg(3)) == "r3"


def test_the_live_graph_leaves_out_what_made_captured_state():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        with coexec.GradientTape():
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    [state] = all_states()
    mine = live(state.graph)

    made = [n for n in state.graph.nodes if n.name == "Tensor.clone"]
    assert made
    assert all(not mine.nodes[n.id].alternatives for n in made)
    assert all(n.id not in mine.edges for n in made)
    verify_graph(mine)
    assert live(mine) == mine


def test_a_graph_with_nothing_to_leave_out_is_itself():
    for _ in range(3):
        with coexec.GradientTape():
            torch.randn(3)
    [state] = all_states()

    assert live(state.graph) is state.graph
