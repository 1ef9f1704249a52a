"""Random numbers of dropout: drawn several at a time, and still eager's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from coexec._native import core
from tests.coexec.harness import compare

pytestmark = pytest.mark.skipif(core is None, reason="needs the native GraphRunner")

#: About one state of the generator, and about one and several of the stretches that are drawn at a time.
COUNTS = st.one_of(st.integers(0, 5), st.integers(300, 330), st.integers(620, 630), st.integers(1000, 3000))
PROBABILITIES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 5e-324, 1 - 2**-53, 2**-53]))


def drawn(like, p):
    geometry = [like.dim(), *like.shape, *like.stride()]
    _, tensor = torch.ops.coexec.bernoulli(torch.zeros(1), geometry, core.scalar_type(like.dtype), p)
    return tensor


def assert_draws_as_eager(like, p):
    state = torch.get_rng_state()
    expected = like.clone(memory_format=torch.preserve_format).bernoulli_(p)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    mine = drawn(expected, p)
    assert mine.dtype == expected.dtype
    assert mine.stride() == expected.stride()
    assert torch.equal(mine, expected)
    assert torch.equal(torch.get_rng_state(), after)


@settings(deadline=None)
@given(
    st.lists(st.tuples(COUNTS, PROBABILITIES), max_size=4),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_numbers_and_the_generators_state_are_eagers(draws, before, dtype):
    torch.manual_seed(len(draws))
    torch.rand(before)  # an odd number of words shifts the pairs
    for count, p in draws:
        assert_draws_as_eager(torch.empty(count, dtype=dtype), p)


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(5, 7).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(0, 4),
        torch.empty(()),
        torch.empty(9, dtype=torch.bfloat16),
        torch.empty(9, dtype=torch.int64),
        torch.empty(9, dtype=torch.bool),
    ],
    ids=["transposed", "channels_last", "empty", "scalar", "bfloat16", "int64", "bool"],
)
def test_any_tensor_gets_what_eager_gives_it(like):
    torch.manual_seed(0)
    assert_draws_as_eager(like, 0.4)


def test_a_normal_number_kept_for_later_is_left_in_the_generator():
    torch.manual_seed(0)
    torch.randn(1)  # numbers of this kind are made in pairs
    state = torch.get_rng_state()
    torch.empty(700).bernoulli_(0.3)
    expected = torch.randn(3)
    torch.set_rng_state(state)
    drawn(torch.empty(700), 0.3)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_that_is_none_is_refused(p):
    with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
        drawn(torch.empty(3), p)


def make():
    torch.manual_seed(0)
    return SimpleNamespace(w=torch.randn(40, 40, requires_grad=True), log=[])


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_dropout_in_an_iteration_draws_eagers_numbers(rate):
    def step(s, k, tape):
        x = torch.rand(3, 40)
        with tape():
            h = F.dropout(x @ s.w, rate)
            y = F.dropout(h.tanh(), 0.5) + torch.empty_like(h).uniform_() * (k % 2)
            y.sum().backward()
        s.log.append((y.detach().clone(), torch.rand(2)))

    compare(make, step, 14)


def test_a_version_is_counted_as_in_eager_when_a_tensor_of_the_user_is_filled():
    def step(s, k, tape):
        with tape():
            s.mask.bernoulli_(0.5)
            total = (s.mask * s.w.detach()).sum()
        s.log.append((total.item(), s.mask._version))

    def make_with_mask():
        state = make()
        state.mask = torch.zeros(40, 40)
        return state

    compare(make_with_mask, step, 12)


def test_calls_one_by_one_draw_eagers_numbers():
    """Where no iteration is like another one, what is recorded is a call."""

    def step(s, k, tape):
        with tape():
            h = s.w.detach()
            for _ in range(1 + k * k % 7):
                h = F.dropout(h, 0.1 * (1 + k % 9))
                s.log.append(h.sum().item())

    compare(make, step, 30)


def test_a_generator_of_the_users_own_is_the_one_that_is_drawn_from():
    def step(s, k, tape):
        with tape():
            mask = torch.empty(50).bernoulli_(0.5, generator=s.generator)
        s.log.append((mask.sum().item(), torch.rand(1).item()))

    def make_with_generator():
        state = make()
        state.generator = torch.Generator().manual_seed(3)
        return state

    compare(make_with_generator, step, 12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_if_it_has_a_dropout(dropout):
    def step(s, k, tape):
        x = torch.randn(2, 2, 5, 8)
        with tape():
            return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout) + torch.rand(1)

    report = compare(SimpleNamespace, step, 8)

    attention = next(n for n in report.graph.nodes if n.name.endswith("scaled_dot_product_attention"))
    assert any(o.random for o in attention.operations) is (dropout > 0)
