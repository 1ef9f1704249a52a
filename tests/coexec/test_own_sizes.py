"""Calls with sizes of their own: loops and branches with other sizes each time equal eager on a graph."""

from __future__ import annotations

import random
from types import SimpleNamespace

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import coexec
from coexec.tracegraph.graph import END, START
from coexec.tracegraph.own_sizes import dominators
from coexec.tracegraph.sizes import Size, substituted, symbol, symbols_in, value_of
from coexec.tracegraph.tape import at_of
from tests.coexec.harness import coexecuted, compare, train


def recurrent():
    model = nn.ModuleDict({"cell": nn.GRUCell(4, 6), "out": nn.Linear(6, 2)})
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def square():
    model = nn.Linear(4, 4)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def graph():
    [state] = coexec.programs.all_states()
    return state.graph


# --- programs -----------------------------------------------------------------------------------------


def unpadded(s, k, tape):
    """A step on sequences that end one after the other, as in a recurrent net without padding."""
    chance = random.Random(k)
    lengths = sorted((chance.randint(2, 6) for _ in range(4)), reverse=True)
    x = torch.randn(4, lengths[0], 4)
    with tape():
        h = x.new_zeros(4, 6)
        for t in range(lengths[0]):
            live = sum(n > t for n in lengths)
            h = torch.cat([s.model["cell"](x[:live, t], h[:live]), h[live:]])
        train(s, s.model["out"](h).square().mean())


def test_a_loop_with_another_number_of_rounds_and_of_rows_has_a_graph(compared_on_the_graph):
    report = compared_on_the_graph(recurrent, unpadded, 60)

    assert coexecuted(report, 25), report.summary()


def test_a_loop_whose_rows_values_decide_about_has_a_graph(compared_on_the_graph):
    """Rows leave when they are sure of themselves, as in adaptive computation."""

    def step(s, k, tape):
        x = torch.randn(6, 4) * (1 + k % 3)

        def halting():
            total, rows, h, rounds = torch.zeros(6, 4), torch.arange(6), x, 0
            while len(rows) and rounds < 5:
                h = torch.tanh(s.model(h)) + 0.5 * h
                total = total.index_add(0, rows, h)
                keep = h.detach().abs().mean(1) > 0.4
                rows, h, rounds = rows[keep], h[keep], rounds + 1
            return total

        with tape():
            train(s, halting().square().mean())

    report = compared_on_the_graph(square, step, 60)

    assert coexecuted(report, 30), report.summary()


def test_experts_that_get_other_rows_each_time_have_a_graph(compared_on_the_graph):
    """An in-place addition in each branch; which branches there are, and their rows, differ in each step."""

    def make():
        experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        model = nn.ModuleDict({"gate": nn.Linear(4, 3), "experts": experts})
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def step(s, k, tape):
        x = torch.randn(7, 4)
        with tape():
            weight = F.softmax(s.model["gate"](x), -1)
            best = weight.argmax(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(s.model["experts"]):
                rows = torch.where(best == number)[0]
                if len(rows):
                    out.index_add_(0, rows, expert(x[rows]) * weight[rows, number, None])
            train(s, (out - x).square().mean())

    report = compared_on_the_graph(make, step, 50)

    assert coexecuted(report, 25), report.summary()


def test_a_branch_that_is_rare_does_right_at_sizes_that_it_was_not_traced_with(compared):
    """A piece of a backward pass with too few sizes to find expressions serves for these only."""

    def step(s, k, tape):
        chance = random.Random(k)
        rows = chance.randint(2, 9)
        x = torch.randn(rows, 4)
        with tape():
            y = x
            for _ in range(chance.randint(1, 3)):
                y = s.model(y).tanh()
            loss = y.mean()
            if k % 7 == 3:
                loss = loss + y.sum() * 0.5
            if k % 11 == 5:
                loss = loss * y.detach().sum()
            train(s, loss)

    compared(square, step, 50)


def test_a_piece_that_came_with_few_sizes_is_for_these(monkeypatch):
    monkeypatch.setattr(coexec.program_state, "ALWAYS_IN_PIECES", True)

    def step(s, k, tape):
        x = torch.randn([2, 3, 4, 5, 3, 2, 5, 4][k], 4)
        with tape():
            y = s.model(x)
            loss = y.mean()
            if k == 3:
                loss = loss + (y * 2).mean()  # the gradient of the other mean is added to this one's
            train(s, loss)

    compare(square, step, 8)

    bound = [n for n in graph().nodes if at_of(n.piece)]
    assert bound
    for node in bound:
        seen = graph().seen[node.id]
        assert seen.values == {tuple(value for _, value in at_of(node.piece))} == {(5,)}


def test_two_numbers_that_a_call_needs_to_be_equal_are_one_size(monkeypatch):
    monkeypatch.setattr(coexec.program_state, "ALWAYS_IN_PIECES", True)

    def step(s, k, tape):
        rows = [2, 3, 5, 4, 6, 3, 2, 5][k]
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        with tape():
            train(s, (s.model(x[:rows]) - y[:rows]).square().mean())

    report = compare(square, step, 8)

    assert coexecuted(report, 2)
    assert len(graph().symbols) == 1, str(graph())


def test_two_numbers_that_were_equal_by_chance_may_differ_later(compared):
    def step(s, k, tape):
        first = [2, 3, 5, 4, 6, 3][k % 6]
        second = first if k < 8 else [3, 2, 4, 6, 5, 2][k % 6]
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        with tape():
            train(s, torch.cat([s.model(x[:first]), s.model(y[:second])]).square().mean())

    compared(square, step, 24)


@pytest.mark.parametrize("rows", [[1, 2, 3, 4], [0, 1, 2, 3], [1, 0, 1, 0]])
def test_small_sizes_in_loops_do_what_eager_does(compared, rows):
    """PyTorch broadcasts ones, and empty tensors have no gradient of a mean."""

    def step(s, k, tape):
        chance = random.Random(k)
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            for _ in range(chance.randint(1, 3)):
                n = chance.choice(rows)
                y = torch.cat([s.model(y[:n]) + y[:1], y[n:]])
            train(s, y.square().mean())

    compared(square, step, 40)


def test_sizes_of_parameters_are_known_before_python_comes_to_them(compared, monkeypatch):
    """A loop over gradients has other sizes in each round, and a value is looked at before it."""
    monkeypatch.setattr(coexec.program_state, "ALWAYS_IN_PIECES", True)

    def make():
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3))
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log=[])

    def step(s, k, tape):
        x = torch.randn(2 + k % 3, 4)
        with tape():
            s.log.append(x.mean().item())
            loss = s.model(x).square().mean()
            s.optimizer.zero_grad(set_to_none=False)
            loss.backward()
            s.optimizer.step()

    compared(make, step, 12)


def test_gradients_of_inputs_have_sizes_that_their_leaves_show(compared, monkeypatch):
    """Which call the gradient comes from differs, and nothing of the forward pass has it as an argument."""
    monkeypatch.setattr(coexec.program_state, "ALWAYS_IN_PIECES", True)

    def step(s, k, tape):
        x = torch.randn(2 + k % 4, 4, requires_grad=True)
        with tape():
            y = s.model(x) if k % 3 else x * 2
            y.square().mean().backward()
            s.log.append(x.grad.sum().item())

    compared(lambda: SimpleNamespace(model=nn.Linear(4, 4), log=[]), step, 24)


def test_calls_of_equal_sizes_keep_the_sign_of_their_zeros(compared, monkeypatch):
    monkeypatch.setattr(coexec.program_state, "ALWAYS_IN_PIECES", True)

    def step(s, k, tape):
        rows, zero = 2 + k % 3, (0.0, -0.0)[k % 2]
        x = torch.ones(8, 4)
        with tape():
            y = s.model(x[:rows])
            y.mean().backward()
            s.kept = x[:rows] * zero

    compared(lambda: SimpleNamespace(model=nn.Linear(4, 4), kept=None), step, 18)


def test_a_tensor_that_is_resized_and_written_to_is_not_waited_for():
    """Its copy would be made before Python says how large it is."""

    def make():
        return SimpleNamespace(model=nn.Linear(4, 3), memory=torch.zeros(4), log=[])

    def step(s, k, tape):
        s.memory.resize_([4, 5, 6, 7][k % 4]).fill_(k)
        x = torch.randn(2, 4)
        with tape(), torch.no_grad():
            s.log.append(x.mean().item())
            s.memory.add_(1.0)
            s.log.append(s.memory.sum().item())
            s.memory.mul_(0.5)

    compare(make, step, 16)


# --- expressions and graphs -----------------------------------------------------------------------------

SYMBOLS = st.integers(0, 3)
FACTORS = SYMBOLS | st.builds(lambda s, c: Size(((1, (s,)),), c, 2), SYMBOLS, st.integers(0, 5))
TERMS = st.tuples(st.integers(-3, 3), st.lists(FACTORS, min_size=1, max_size=2).map(tuple))
SIZES = st.builds(
    Size,
    st.lists(TERMS, min_size=1, max_size=3).map(tuple),
    st.integers(-5, 5),
    st.sampled_from([1, 1, 2, 3]),
)
VALUES = st.lists(st.integers(0, 9), min_size=4, max_size=4)


@given(SIZES, st.dictionaries(SYMBOLS, SIZES | st.integers(0, 9)), VALUES)
def test_an_expression_with_others_in_place_of_its_symbols_has_their_values(size, others, values):
    inner = {s: value_of(other, values.__getitem__) for s, other in others.items()}

    made = substituted(size, others)

    assert value_of(made, values.__getitem__) == value_of(size, lambda s: inner.get(s, values[s]))
    assert symbols_in(made) <= set(range(4))


def test_sums_in_which_a_symbol_cancels_out_are_without_it():
    rest = Size(((1, (1,)), (-1, (0,))))
    both = Size(((1, (0,)), (1, (2,))))

    assert substituted(both, {2: rest}) == symbol(1)
    assert substituted(both, {2: Size(((-1, (0,)),), 4)}) == 4


@given(st.integers(1, 9), st.data())
def test_dominators_are_those_of_networkx(count, data):
    edges = {START: [0]} | {n: [n + 1] for n in range(count - 1)} | {count - 1: [END]}
    for source in (START, *range(count)):
        more = data.draw(st.lists(st.sampled_from([*range(source + 1, count), END])))
        edges[source] = list(dict.fromkeys([*edges[source], *more]))
    of_nx = nx.DiGraph([(s, t) for s, targets in edges.items() for t in targets])
    immediate = nx.immediate_dominators(of_nx, START)

    found = dominators(edges, count)

    for node in range(count):
        expected, at = 0, node
        while immediate.get(at, START) not in (START, at):
            at = immediate[at]
            expected |= 1 << at
        assert found[node] == expected
