"""Sizes that vary: expressions, and programs that are one path for all sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from coexec.tracegraph.expressions import Expressions
from coexec.tracegraph.graph import symbols_of
from coexec.tracegraph.sizes import Size, symbol, value_of, value_range
from tests.coexec.harness import coexecuted, compare, train

LENGTHS = [7, 9, 5, 8, 6, 9, 7, 5, 8, 6, 7, 9, 5, 6]  # the first four show the range


# --- expressions ----------------------------------------------------------------------------------


def expressions(**values):
    known = Expressions()
    for number, seen in enumerate(values.values()):
        known.add_symbol(number, seen)
    return known


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((4, 4, 4), "4"),
        ((5, 7, 9), "s0"),
        ((10, 14, 18), "2*s0"),
        ((25, 49, 81), "s0*s0"),
        ((30, 56, 90), "s0*s1"),
        ((4, 6, 8), "s0 - 1"),
        ((11, 15, 19), "s0 + (s0 + 1)"),
        ((2, 3, 4), "(s0 - 1)//2"),
        ((16, 22, 28), "3*s0 + 1"),
    ],
)
def test_sizes_are_explained_by_the_simplest_expression(values, text):
    known = expressions(batch=(5, 7, 9), length=(6, 8, 10))
    found = known.find(values)
    symbols = [(5, 7, 9), (6, 8, 10)]
    for trace, value in enumerate(values):
        assert value_of(found, lambda s, trace=trace: symbols[s][trace]) == value
    if text in ("4", "s0", "2*s0", "s0*s0", "s0*s1", "s0 - 1"):
        assert str(found) == text


def test_values_that_follow_from_nothing_have_no_expression():
    assert expressions(batch=(5, 7, 9)).find((3, 3, 11)) is None


def test_two_values_do_not_make_a_line():
    """A slope and a constant would fit any two points."""
    assert expressions(batch=(5, 7)).find((8, 21)) is None


def test_a_division_that_never_had_a_remainder_has_no_value_where_there_is_one():
    half = expressions(batch=(4, 8, 6)).find((2, 4, 3))
    assert value_of(half, lambda _: 10) == 5
    assert value_of(half, lambda _: 9) is None


def test_an_expression_has_no_value_before_its_symbols_have():
    assert value_of(symbol(3), lambda _: None) is None
    assert value_of(Size(((2, (symbol(0), 1)),), 5), {0: 3}.get) is None


sizes = st.recursive(
    st.integers(0, 2).map(symbol),
    lambda inner: st.builds(
        Size,
        st.lists(
            st.tuples(
                st.integers(-3, 4),
                st.lists(st.one_of(st.integers(0, 2), inner), min_size=1, max_size=2).map(tuple),
            ),
            min_size=1,
            max_size=2,
        ).map(tuple),
        st.integers(-4, 4),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_leaves=4,
)


def by_hand(size, values):
    if isinstance(size, int):
        return values[size]
    total = size.constant
    for coefficient, factors in size.terms:
        product = coefficient
        for factor in factors:
            product *= by_hand(factor, values)
        total += product
    if size.exact and total % size.divisor:
        raise ArithmeticError
    return total // size.divisor


@given(sizes, st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_native_code_evaluates_sizes_as_python_does(size, values):
    core = pytest.importorskip("coexec._native._core")
    from coexec.runners.sizes import encoded

    try:
        expected = by_hand(size, values)
    except ArithmeticError:
        expected = None
    assert value_of(size, dict(enumerate(values)).get) == expected
    assert core.size_value(encoded(size), values) == expected


@given(sizes, st.lists(st.tuples(*[st.integers(0, 12)] * 3), min_size=3, max_size=6))
def test_what_is_found_has_the_values_that_it_was_found_for(size, traces):
    try:
        values = tuple(by_hand(size, symbols) for symbols in traces)
    except ArithmeticError:
        return
    columns = tuple(zip(*traces, strict=True))
    known = expressions(**dict(zip("abc", columns, strict=True)))
    known.find(tuple(a + 1 for a in columns[0]))  # later sizes may be made of it

    found = known.find(values)

    if found is not None:
        assert tuple(value_of(found, symbols.__getitem__) for symbols in traces) == values


@given(
    st.lists(st.integers(2, 1000), min_size=1)
    | st.lists(st.integers(1, 9), min_size=1).map(lambda v: [*v, 1])
)
def test_a_range_holds_what_was_seen_and_zero_and_one_only_then(values):
    allowed = value_range(values)
    assert all(map(allowed.admits, values))
    assert allowed.admits(0) == (0 in values)
    assert allowed.admits(1) == (1 in values)
    assert not allowed.admits(2 * max(values) + 1)


# --- programs --------------------------------------------------------------------------------------


def of_model(model, optimizer=torch.optim.SGD, **options):
    def make():
        made = model()
        return SimpleNamespace(model=made, optimizer=optimizer(made.parameters(), lr=0.05, **options), log=[])

    return make


class Attention(nn.Module):
    """A causal transformer block over ragged lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.position = nn.Parameter(torch.randn(32, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 20)

    def forward(self, ids):
        length = ids.size(1)
        h = self.embedding(ids) + self.position[:length]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        return self.out(self.block(h, src_mask=mask))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, ceil_mode=True),
        )
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


def one_path(report, traces=8):
    """Few traces, and all iterations after them co-executed."""
    assert coexecuted(report, 6), report.summary()
    assert report.traces <= traces, report.summary()
    return True


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_batches_of_any_size_are_one_path(optimizer):
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k], 4)
        y = torch.randint(3, (LENGTHS[k],))
        with tape():
            loss = F.cross_entropy(s.model(x), y)
            train(s, loss)
            s.log.append(loss.item())

    assert one_path(compare(of_model(lambda: nn.Linear(4, 3), optimizer), step, 14))


def test_sequences_of_any_length_are_one_path():
    def step(s, k, tape):
        ids = torch.randint(20, (2 + k % 3, LENGTHS[k]))
        with tape():
            logits = s.model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 20), ids[:, 1:].reshape(-1))
            train(s, loss)
        s.log.append((loss.item(), tuple(logits.shape)))

    assert one_path(compare(of_model(Attention), step, 14))


def test_images_of_any_size_are_one_path():
    def step(s, k, tape):
        side = 2 * LENGTHS[k] + k % 2
        x = torch.randn(4, 1, side, side)
        with tape():
            loss = s.model(x).square().mean()
            train(s, loss)
        s.log.append(loss.item())

    assert one_path(compare(of_model(Convolutional), step, 14), traces=10)


def test_numbers_that_decide_about_shapes_are_sizes():
    def step(s, k, tape):
        n = LENGTHS[k]
        with tape():
            x = torch.arange(n * 4, dtype=torch.float32).view(n, 4) / n
            y = torch.zeros(n, 3) + torch.ones(n)[:, None]
            loss = F.mse_loss(s.model(x).tanh(), y[: len(x)], reduction="sum") / n
            train(s, loss)
            s.log.append(loss.item())

    assert one_path(compare(of_model(lambda: nn.Linear(4, 3)), step, 14))


def test_two_sizes_that_were_equal_in_all_traces_may_differ_later():
    def step(s, k, tape):
        n = LENGTHS[k]
        m = n if k < 9 else LENGTHS[-k]
        x, z = torch.randn(n, 4), torch.randn(m, 4)
        with tape():
            loss = s.model(x).square().mean() + s.model(z).mean()
            train(s, loss)
            s.log.append(loss.item())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 14)
    assert report.fallbacks


def test_sizes_of_one_are_on_the_path_of_others_when_they_have_been_traced():
    """As the number of objects in an image is."""
    numbers = [3, 1, 4, 2, 5, 1, 3, 1, 2, 4, 1, 5]

    def step(s, k, tape):
        x, objects = torch.randn(6, 4), torch.randn(numbers[k], 3)
        with tape():
            near = (s.model(x) @ objects.t()).softmax(1)
            loss = (near @ objects).square().mean()
            train(s, loss)
            s.log.append(loss.item())

    assert one_path(compare(of_model(lambda: nn.Linear(4, 3)), step, 12), traces=6)


@pytest.mark.parametrize("size", [0, 1, 40])
def test_sizes_that_are_far_from_those_of_the_traces_are_traced(size):
    def step(s, k, tape):
        x = torch.randn(size if k == 8 else LENGTHS[k], 4)
        with tape():
            loss = s.model(x).square().sum()
            train(s, loss)
            s.log.append(loss.item())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 14)
    assert report.fallbacks == 1
    assert coexecuted(report, 6)


def test_a_state_grows_from_iteration_to_iteration():
    """As the keys and values of decoding do."""

    def make():
        state = of_model(lambda: nn.Linear(4, 4))()
        state.cache = torch.zeros(2, 4)
        return state

    def step(s, k, tape):
        x = torch.randn(1, 4)
        with tape():
            s.cache = torch.cat([s.cache, s.model(x).detach()])
            loss = (s.model(x) @ s.cache.t()).softmax(1).square().sum()
            train(s, loss)
            s.log.append((loss.item(), len(s.cache)))

    report = compare(make, step, 40)
    assert coexecuted(report, 20)
    assert report.fallbacks <= 4


def test_results_that_view_tensors_from_outside_are_eagers():
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k], 4)
        with tape():
            s.seen = x[1:, :2]
            s.end = x[-1]
            x.mul_(2)
            loss = s.model(x).square().mean()
            train(s, loss)
        s.log.append(s.seen.sum().item())
        s.seen.add_(1)
        s.log.append(x.sum().item())

    compare(of_model(lambda: nn.Linear(4, 3)), step, 14)


def test_the_end_of_a_tensor_is_a_size():
    def step(s, k, tape):
        x, n = torch.randn(20, 4), LENGTHS[k]
        with tape():
            loss = s.model(x[-n:]).square().mean() + x[n : 2 * n].sum() / n
            train(s, loss)
            s.log.append(loss.item())

    assert one_path(compare(of_model(lambda: nn.Linear(4, 3)), step, 14))


def test_a_number_that_changes_its_sign_is_no_size():
    def step(s, k, tape):
        x = torch.randn(20, 4)
        with tape():
            loss = s.model(x.roll(LENGTHS[k] - 7, 0)[:5]).square().mean()
            train(s, loss)
            s.log.append(loss.item())

    compare(of_model(lambda: nn.Linear(4, 3)), step, 14)


def test_shapes_that_python_reads_are_eagers():
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k], 6)
        with tape():
            h = s.model(x).view(-1, 3, 2).transpose(0, 1)
            parts = h.chunk(2, dim=1)
            s.log.append([(tuple(p.shape), p.stride(), p.storage_offset(), p.is_contiguous()) for p in parts])
            loss = sum((i + 1) * p.square().mean() for i, p in enumerate(parts))
            train(s, loss)

    compare(of_model(lambda: nn.Linear(6, 6)), step, 14)


def test_a_program_with_branches_has_each_path_for_all_sizes():
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k % 14], 4)
        with tape():
            loss = s.model(x).square().mean()
            if k % 2:
                loss = loss + s.model(x[:3]).abs().mean()
            train(s, loss)
            s.log.append(loss.item())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 28)
    assert coexecuted(report, 12)


def test_lengths_of_each_row_are_numbers():
    """A loop over the rows of a padded batch."""

    def step(s, k, tape):
        x = torch.randn(3, 12, 4)
        lengths = [3 + (k * 5 + i * 7) % 9 for i in range(3)]
        with tape():
            loss = sum(s.model(row[:n]).square().mean() for row, n in zip(x, lengths, strict=True))
            train(s, loss)
            s.log.append(loss.item())

    compare(of_model(lambda: nn.Linear(4, 3)), step, 20)


def test_operations_on_sizes_that_vary_are_not_placed():
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k], 4)
        with tape():
            loss = s.model(x).square().mean()
            train(s, loss)
            s.log.append(loss.item())

    assert one_path(compare(of_model(lambda: nn.Linear(4, 3)), step, 14, executor="placed"))


def test_a_report_says_what_sizes_may_be():
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k], 4)
        with tape():
            train(s, (s.model(x).sum(0) / len(x)).square().mean())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 14)

    assert "sizes that vary: s0 from 3 to 18" in report.summary()
    assert "nn.linear(feed[s0, 4], c0, c1)" in str(report)
    assert "Tensor.div(%1, s0)" in str(report)


def test_a_node_needs_the_symbols_of_its_operations():
    def step(s, k, tape):
        x = torch.randn(LENGTHS[k], 4)
        with tape():
            h = s.model(x)
            chosen = h[x[:, 0] > -1]
            train(s, chosen.square().mean())

    report = compare(of_model(lambda: nn.Linear(4, 3)), step, 14)

    needed = {
        n.name: symbols_of(n) for n in report.graph.nodes if n.name in ("nn.linear", "Tensor.__getitem__")
    }
    assert needed["nn.linear"] == {0}
    assert needed["Tensor.__getitem__"] == {0}, "how many are chosen is known behind it"
