"""Backward passes in pieces: paths that no trace had equal eager, and few traces cover many of them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coexec
from coexec.tracegraph.closure import closed
from coexec.tracegraph.in_pieces import in_pieces
from coexec.tracegraph.live import live
from coexec.tracegraph.merge import merge
from coexec.tracegraph.symbolic import lower
from coexec.tracegraph.tape import Begun, Passed, Reached, Tape, Unknown, route
from coexec.tracegraph.verify import verify_graph, verify_program, verify_trace
from tests.coexec.harness import Twice, coexecuted, compare, linear, train, weights


class Residual(nn.Module):
    """Layers that are left out at random, as in stochastic depth."""

    def __init__(self, depth):
        super().__init__()
        self.inward, self.outward = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(depth)
        )

    def forward(self, x, kept):
        h = self.inward(x)
        for layer, keep in zip(self.layers, kept, strict=True):
            if keep:
                h = h + layer(h)
        return self.outward(h)


def residual(depth, optimizer=torch.optim.AdamW, probability=0.6):
    def make():
        model = Residual(depth)
        return SimpleNamespace(model=model, optimizer=optimizer(model.parameters(), lr=0.01))

    def step(s, k, tape):
        kept = [random.Random(1000 * k + i).random() < probability for i in range(depth)]
        x = torch.randn(5, 4)
        with tape():
            train(s, F.cross_entropy(s.model(x, kept), torch.tensor([0, 1, 2, 0, 1])))

    return make, step


# --- few traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_layers_left_out_at_random_need_few_traces_of_many_paths(compared_on_the_graph, optimizer):
    report = compared_on_the_graph(*residual(8, optimizer), 48)

    assert coexecuted(report, 32)
    assert report.traces <= 14, report.summary()
    assert report.fallbacks <= 2, report.summary()


def test_experts_that_rows_are_sent_to_need_few_traces():
    def make():
        experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        return SimpleNamespace(model=experts, optimizer=torch.optim.SGD(experts.parameters(), lr=0.1))

    def step(s, k, tape):
        x, chance = torch.randn(3, 4), random.Random(k)
        with tape():
            y = x * 0.5
            for expert in s.model:
                if chance.random() < 0.5:
                    y = y + expert(x).tanh()
            loss = y.square().mean()
            s.optimizer.zero_grad()
            if loss.requires_grad:
                loss.backward()
            s.optimizer.step()

    report = compare(make, step, 48)

    assert coexecuted(report, 30)
    assert report.traces <= 16, report.summary()


def test_a_program_that_always_takes_one_path_has_its_backward_pass_in_one_piece():
    def step(s, k, tape):
        with tape():
            train(s, s.model(torch.ones(2, 4)).square().mean())

    compare(linear, step, 8)

    [state] = coexec.programs.all_states()
    assert not state.in_pieces
    assert sum(n.backward for n in state.graph.nodes) == 1


def test_alternatives_go_with_the_ways_that_led_to_them(compared, monkeypatch):
    """The way from a guessed argument's maker went through nodes of the optimizer's first step."""
    monkeypatch.setattr(coexec.program_state, "ALWAYS_IN_PIECES", True)

    def make():
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, amsgrad=True, foreach=True)
        return SimpleNamespace(model=layers, optimizer=optimizer, chance=random.Random(0))

    def step(s, k, tape):
        x = torch.randn(4, 3)

        def block():
            h = x
            for layer in s.model:
                if s.chance.random() < 0.7:
                    h = h + layer(h).tanh()
            loss = (x + h).square().mean()
            s.optimizer.zero_grad(set_to_none=False)
            if loss.requires_grad:
                loss.backward()
            s.optimizer.step()

        with tape():
            block()

    compared(make, step, 16)


# --- what eager execution does, on paths that no trace had ----------------------------------------------


def test_gradients_of_values_that_python_picks_are_those_of_what_it_picked(compared):
    """The picked value shows in no call, and a backward pass was taken for that of another pick."""

    def step(s, k, tape):
        x = torch.randn(3, 4)

        def forward():
            h = s.model(x)
            doubled, exponential = h * 2, h.exp()
            return exponential if k % 3 == 1 else doubled

        with tape():
            h = forward()
            train(s, (h * h).sum())

    assert coexecuted(compared(linear, step, 18), 9)


def test_a_value_and_what_detach_makes_of_another_one_stay_apart(compared):
    """In the traces both were one value, and one was read for the other."""
    picks = [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 1), (1, 0), (0, 1)]

    def step(s, k, tape):
        x, (first, second) = torch.arange(4.0) + k, picks[k % len(picks)]
        with tape():
            values = (x * 2, x * 3)
            product = values[first].detach() * values[second]
            s.out = product.sum()

    compared(lambda: SimpleNamespace(), step, 18)


def test_a_tensor_that_is_written_through_a_view_is_shown_with_eagers_autograd_node():
    def step(s, k, tape):
        x = torch.randn(2, 4)

        def block():
            copy = s.model(x).tanh().clone()
            copy[:, 1].mul_(0.5)
            train(s, copy.square().mean())
            s.log.append(repr(copy))

        with tape():
            block()

    compare(linear, step, 8)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_hook_that_is_there_in_some_steps_is_called_in_these():
    def step(s, k, tape):
        x = torch.randn(5, 4)

        def block():
            h = s.model(x)
            y = h.tanh()
            y.sigmoid()
            if k % 3 == 1:
                y.register_hook(lambda g: s.log.append(g.norm().item()))
            train(s, (y + h).square().mean())

        with tape():
            block()

    compare(linear, step, 12)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_hooked_leaf_on_a_path_that_had_none_is_called():
    def make():
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        state = SimpleNamespace(model=layers, optimizer=torch.optim.SGD(layers.parameters(), lr=0.1), log=[])
        layers[2].weight.register_hook(lambda g: state.log.append(g.sum().item()))
        return state

    used = [(0,), (1,), (0,), (1,), (0, 1), (0,), (0, 1, 2), (1,), (2,), (0, 2)]

    def step(s, k, tape):
        x = torch.randn(5, 3)
        with tape():
            for i in used[k % len(used)]:
                x = x + s.model[i](x)
            train(s, x.square().mean())

    compare(make, step, 20)


@pytest.mark.usefixtures("in_pieces_always")
@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.sin])
def test_a_saved_value_that_is_written_on_a_path_that_no_trace_had_raises_as_in_eager(function):
    """The calls of this path were all traced, but never together."""
    ways = [(0, 0), (1, 0), (0, 1), (0, 0), (1, 0), (0, 1), (0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 1)]

    def step(s, k, tape):
        x, (saves, writes) = torch.randn(3, 4), ways[k % len(ways)]

        def block():
            h = s.model(x) * 1
            y = function(h) if saves else h + 1
            if writes:
                (y if function is not torch.sin else h).add_(1)
            train(s, y.sum())

        with tape():
            block()

    compare(linear, step, 24)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_second_backward_pass_on_a_path_that_no_trace_had_raises_as_in_eager():
    ways = [(1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (1, 1), (1, 0), (1, 1)]

    def step(s, k, tape):
        x, (first, second) = torch.randn(3, 4), ways[k % len(ways)]

        def block():
            h = s.model(x).exp()
            s.optimizer.zero_grad()
            if first:
                h.sum().backward()
            if second:
                h.square().sum().backward()
            s.optimizer.step()

        with tape():
            block()

    compare(linear, step, 22)


@pytest.mark.usefixtures("in_pieces_always")
@pytest.mark.parametrize("retain", [{"retain_graph": True}, {"retain_graph": False}, {}])
def test_two_backward_passes_through_the_same_calls_add_their_gradients(retain):
    def step(s, k, tape):
        x = torch.randn(3, 4)

        def block():
            h = s.model(x).exp()
            s.optimizer.zero_grad()
            h.sum().backward(retain_graph=True)
            if k % 2:
                h.square().sum().backward(**retain)
            s.optimizer.step()

        with tape():
            block()

    compare(linear, step, 12)


@pytest.mark.usefixtures("in_pieces_always")
def test_leaves_that_get_the_same_gradient_do_not_share_its_memory(compared_on_the_graph):
    """Eager execution copies what another leaf still waits for; which one that is depends on the path."""

    def step(s, k, tape):
        with tape():
            total = s.a + s.b if k % 2 else s.a * 1 + s.b
            if k % 3 == 0:
                total = total + s.c
            s.a.grad = s.b.grad = s.c.grad = None
            total.sum().backward()
            for leaf in (s.a, s.b, s.c):
                if leaf.grad is not None:
                    leaf.grad.mul_(0.5)

    compared_on_the_graph(weights("a", "b", "c"), step, 24)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_gradient_that_python_gives_is_no_leafs_own():
    def step(s, k, tape):
        with tape():
            s.a.grad = s.b.grad = None
            y = s.a + s.b if k % 2 else s.a * 2
            y.backward(s.seed)
            s.a.grad.add_(1)

    def make():
        state = weights("a", "b")()
        state.seed = torch.full((3,), 2.0)
        return state

    compare(make, step, 12)


@pytest.mark.usefixtures("in_pieces_always")
@pytest.mark.parametrize("scale", [None, 2.0])
def test_gradients_are_added_to_those_that_are_there(compared_on_the_graph, scale):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            for _ in range(1 + k % 3):
                loss = s.model(x).square().mean()
                (loss if scale is None else loss * scale).backward()
            if k % 2:
                s.optimizer.step()
                s.optimizer.zero_grad(set_to_none=k % 4 == 1)

    compared_on_the_graph(linear, step, 24)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_network_that_runs_several_times_gets_its_gradients_at_the_first_of_its_calls():
    """Its leaves come in the order in which they are arguments there, not in that of the last call."""

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            y = F.linear(h, s.model.weight.t(), None) if k % 2 else h
            y = y + s.model.bias.sum()
            train(s, y.square().mean() + sum(p.pow(2).sum() for p in s.model.parameters()))

    assert coexecuted(compare(linear, step, 16), 10)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_tensor_of_the_iteration_may_be_a_leaf():
    def step(s, k, tape):
        with tape():
            x = torch.ones(2, 4).mul(k).requires_grad_()
            y = s.model(x) if k % 2 else s.model(x).exp()
            train(s, y.sum())
            s.log.append(x.grad.norm().item())

    compare(linear, step, 12)


@pytest.mark.usefixtures("in_pieces_always")
def test_an_iteration_that_falls_back_behind_its_backward_pass_has_its_gradients():
    def step(s, k, tape):
        with tape():
            s.optimizer.zero_grad()
            h = s.model(torch.ones(2, 4))
            (h if k % 2 else h.exp()).square().mean().backward()
            held = s.model.weight.grad
            if k == 9:
                s.log.append(held.clone().sum().item() + 1)
            s.optimizer.step()
            s.kept = held

    report = compare(linear, step, 14)

    assert report.fallbacks >= 1, report.summary()


@pytest.mark.usefixtures("in_pieces_always")
def test_batch_norm_in_two_passes_of_one_network_is_no_write_to_what_was_saved():
    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def step(s, k, tape):
        x, y = torch.randn(5, 4), torch.randn(5, 4)
        with tape():
            loss = s.model(x).square().mean()
            if k % 2:
                loss = loss + s.model(y).exp().mean()
            train(s, loss)

    assert coexecuted(compare(make, step, 16), 8)


def test_a_call_may_make_thousands_of_autograd_nodes():
    def make():
        model = nn.GRU(2, 3)
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def step(s, k, tape):
        x = torch.randn(400, 1, 2)
        with tape():
            train(s, s.model(x)[0].square().mean())

    assert coexecuted(compare(make, step, 5), 1)


@pytest.mark.usefixtures("in_pieces_always")
def test_what_cannot_be_taken_to_pieces_stays_whole():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            h = Twice.apply(h) if k % 2 else h.exp()
            train(s, h.square().mean())

    assert coexecuted(compare(linear, step, 16), 6)


# --- structures -----------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """The traces of the programs that a test runs, as they were recorded."""
    found = []
    original = coexec.program_state.ProgramState.traced

    def traced(self, trace, why, **options):
        found.append(trace)
        original(self, trace, why, **options)

    monkeypatch.setattr(coexec.program_state.ProgramState, "traced", traced)
    return found


def test_a_backward_pass_has_a_piece_for_each_call_and_each_leaf(traces):
    compare(*residual(2, probability=1.0), 3)

    apart = in_pieces(traces[-1])
    verify_trace(apart)
    verify_graph(merge([apart]))
    pieces = [e.piece for e in apart.events if e.piece is not None]
    calls = [i for i, e in enumerate(apart.events) if e.tape is not None]
    assert isinstance(pieces[0], Begun)
    assert [p.of for p in pieces if isinstance(p, Passed)] == calls[::-1]
    assert sum(isinstance(p, Reached) for p in pieces) == len(list(Residual(2).parameters()))
    whole, taken_apart = (
        [o.target for e in trace.events if e.backward for o in e.operations] for trace in (traces[-1], apart)
    )
    assert sorted(map(str, whole)) == sorted(map(str, taken_apart))


def test_an_edge_is_guessed_where_two_places_have_an_edge_in_common(traces):
    compare(*residual(3), 8)
    graph = merge([in_pieces(t) for t in traces if t is not None], guess=False)

    more = closed(graph)

    verify_graph(more)
    for source, targets in graph.edges.items():
        assert more.edges[source][: len(targets)] == targets
    for before, after in zip(graph.nodes, more.nodes, strict=True):
        ways = [(a.bindings, a.sources, a.number) for a in after.alternatives]
        assert ways[: len(before.alternatives)] == [
            (a.bindings, a.sources, a.number) for a in before.alternatives
        ]
    assert sum(map(len, more.edges.values())) > sum(map(len, graph.edges.values()))


def test_a_node_that_takes_what_an_earlier_one_took_needs_no_choice_of_its_own(traces):
    """Of each layer the norm is told its input; the addition and the backward pass have the same one."""
    compare(*residual(3), 12)
    graph = live(merge([in_pieces(t) for t in traces if t is not None]))

    program = lower(graph)

    verify_program(graph, program)
    chosen = [i for i, plan in enumerate(program.plans) if plan.select is not None]
    names = {graph.nodes[i].name for i in chosen}
    assert "nn.functional.layer_norm" in names
    assert names.isdisjoint({"Tensor.add", "backward of nn.functional.layer_norm"})
    assert any(a.after is not None for n in graph.nodes if n.name == "Tensor.add" for a in n.alternatives)


def test_a_guess_that_a_trace_is_against_is_not_made(compared_on_the_graph):
    """Both calls take one of two values; in some steps they do not take the same one."""

    def step(s, k, tape):
        x, chance = torch.randn(3, 4), random.Random(k)
        with tape():
            h = s.model(x)
            for _ in range(4):
                if chance.random() < 0.5:
                    h = h.tanh() * h
            first = h if chance.random() < 0.7 else h.sin()
            train(s, (first.square() + h).mean())

    compared_on_the_graph(linear, step, 40)


@pytest.mark.usefixtures("in_pieces_always")
def test_a_node_that_takes_what_an_earlier_one_took_may_be_given_a_new_tensor(compared_on_the_graph):
    def step(s, k, tape):
        x, chance, rows = torch.randn(5, 4), random.Random(k), torch.tensor([k % 5, 0])
        with tape():
            h = s.model(x)
            if chance.random() < 0.5:
                h = h + h.tanh()
            if chance.random() < 0.5:
                h = h.sin()
            part = h[1:3]
            train(s, h.index_add(0, rows, part).square().mean())

    compared_on_the_graph(linear, step, 30)


TAPES = [Tape((0,), (frozenset({0}),)), Tape((0,), (frozenset({0, 1}),)), Tape((0,), (frozenset({0, 1}),))]
TARGETS = {(0, 0): "w", (1, 0): (0, 0), (1, 1): "w", (2, 0): (1, 0), (2, 1): (0, 0)}


def test_a_backward_pass_goes_from_the_latest_event_to_the_first_one():
    way = route(TAPES, lambda event, argument: TARGETS[event, argument], (2, 0))

    assert way.events == (2, 1, 0)
    assert way.last == {"w": 0}


def test_a_backward_pass_leaves_out_what_it_does_not_reach():
    way = route(TAPES, lambda event, argument: TARGETS[event, argument], (0, 0))

    assert way.events == (0,)


def test_a_backward_pass_through_an_unknown_event_is_unknown():
    with pytest.raises(Unknown):
        route([None, *TAPES[1:]], lambda event, argument: TARGETS[event, argument], (2, 0))


@pytest.mark.usefixtures("in_pieces_always")
def test_a_pass_in_pieces_behind_one_that_is_whole_raises_as_in_eager_when_that_has_freed_its_graph():
    ways = [(1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (1, 1), (1, 0), (1, 1)]

    def step(s, k, tape):
        x, (first, second) = torch.randn(3, 4), ways[k % len(ways)]

        def block():
            h = s.model(x).exp()
            s.optimizer.zero_grad()
            if first:
                torch.autograd.grad(h.sum(), [s.model.weight])
            if second:
                h.square().sum().backward()
            s.optimizer.step()

        with tape():
            block()

    compare(linear, step, 18)


@pytest.mark.parametrize("where", ["one way", "two ways", "a leaf"])
def test_a_tensor_whose_data_was_assigned_goes_on_with_its_gradient(where, in_pieces_always):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            h = s.model(x)
            if k % 3 == 2:
                h = h.tanh()
            if where == "a leaf":
                s.model.bias.data = s.model.bias * 0.5
                loss = (h + s.model.bias).square().mean()
            else:
                other = h.clone()
                other.data = other * 0.5
                loss = (other + h).square().mean() if where == "two ways" else other.square().mean()
            train(s, loss)

    compare(linear, step, 14)
