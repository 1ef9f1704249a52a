"""The native module's kernels for compiled blocks, in parts or whole, against eager's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coexec._native import core
from coexec.executors import job
from tests.coexec.native_kernels import handle, load, numbers, tensor_of

pytestmark = pytest.mark.skipif(
    not job.finds_native(), reason="blocks cannot find the native module's kernels"
)


@pytest.fixture(scope="module")
def native():
    return load()


def assert_like(mine, expected):
    assert mine.shape == expected.shape
    assert mine.stride() == expected.stride()
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)  # sums of up to 512 products, in parts


SIZES = st.sampled_from([1, 2, 3, 16, 127, 128, 130, 300, 512])  # some below what is cut, and odd ones
LAYOUT = st.booleans()


def matrix(rows, columns, transposed, batch=()):
    made = torch.randn(*batch, columns, rows).mT if transposed else torch.randn(*batch, rows, columns)
    return made


@settings(deadline=None, max_examples=60)
@given(SIZES, SIZES, SIZES, LAYOUT, LAYOUT)
def test_products_are_eagers(native, m, k, n, a_transposed, b_transposed):
    a, b = matrix(m, k, a_transposed), matrix(k, n, b_transposed)
    out = torch.full((m, n), torch.nan)

    assert native.coexec_cpu_mm_out(handle(out), handle(a), handle(b)) == 0

    assert_like(out, a @ b)


@settings(deadline=None, max_examples=60)
@given(SIZES, SIZES, SIZES, st.sampled_from(["(n)", "(1)", "(m, n)", "(m, 1)", "(1, n)"]), LAYOUT)
def test_products_that_add_something_are_eagers(native, m, k, n, shape, transposed):
    a, b = matrix(m, k, False), matrix(k, n, transposed)
    size = {"(n)": (n,), "(1)": (1,), "(m, n)": (m, n), "(m, 1)": (m, 1), "(1, n)": (1, n)}[shape]
    added, out = torch.randn(size), torch.full((m, n), torch.nan)
    factors = ctypes.c_double(0.5), ctypes.c_double(2.0)

    assert native.coexec_cpu_addmm_out(handle(out), handle(added), handle(a), handle(b), *factors) == 0

    assert_like(out, torch.addmm(added, a, b, beta=0.5, alpha=2.0))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 3, 8]), SIZES, st.sampled_from([1, 16, 130]), SIZES, LAYOUT, LAYOUT)
def test_batches_of_products_are_eagers(native, batch, m, k, n, transposed, broadcast):
    a, b = matrix(m, k, transposed, (batch,)), matrix(k, n, False, (batch,))
    added = torch.randn(1 if broadcast else batch, m, n)
    out, sum_ = torch.full((batch, m, n), torch.nan), torch.full((batch, m, n), torch.nan)
    factors = ctypes.c_double(1.0), ctypes.c_double(-1.0)

    assert native.coexec_cpu_bmm_out(handle(out), handle(a), handle(b)) == 0
    assert native.coexec_cpu_baddbmm_out(handle(sum_), handle(added), handle(a), handle(b), *factors) == 0

    assert_like(out, a @ b)
    assert_like(sum_, torch.baddbmm(added, a, b, alpha=-1.0))


@st.composite
def convolutions(draw):
    dims = draw(st.sampled_from([1, 2]))
    groups = draw(st.sampled_from([1, 2]))
    transposed = draw(st.booleans())
    size = draw(st.sampled_from([1, 3]))
    channels = [groups * draw(st.sampled_from([1, 8, 16])) for _ in range(2)]
    weight = (channels[0], channels[1] // groups) if transposed else (channels[1], channels[0] // groups)
    side = draw(st.sampled_from([9, 16, 20]))
    batch = draw(st.sampled_from([1, 2, 3, 4, 5, 16, 33]))
    last = draw(st.booleans()) and dims == 2
    memory = torch.channels_last if last else torch.contiguous_format
    return SimpleNamespace(
        x=torch.randn(batch, channels[0], *[side] * dims).to(memory_format=memory),
        w=torch.randn(*weight, *[size] * dims).to(memory_format=memory),
        b=torch.randn(channels[1]) if draw(st.booleans()) else None,
        stride=[draw(st.sampled_from([1, 2]))] * dims,
        padding=[draw(st.sampled_from([0, 1])) if size == 3 else 0] * dims,
        dilation=[1] * dims,
        transposed=transposed,
        output_padding=[0] * dims,
        groups=groups,
    )


def settings_of(c):
    lists = [numbers(c.stride), numbers(c.padding), numbers(c.dilation)]
    flat = [part for pair in lists for part in pair]
    return [*flat, ctypes.c_int32(c.transposed), *numbers(c.output_padding), ctypes.c_int64(c.groups)]


def eager_settings(c):
    return c.stride, c.padding, c.dilation, c.transposed, c.output_padding, c.groups


@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_convolutions_are_eagers_strides_included(native, c):
    bias = ctypes.byref(handle(c.b)) if c.b is not None else None
    out = ctypes.c_void_p()

    status = native.coexec_cpu_convolution(handle(c.x), handle(c.w), bias, *settings_of(c), ctypes.byref(out))

    assert status == 0
    assert_like(tensor_of(out), torch.convolution(c.x, c.w, c.b, *eager_settings(c)))


@settings(deadline=None, max_examples=80)
@given(convolutions(), st.sampled_from(["iwb", "iw", "wb", "w", "i", "b", "ib"]))
def test_gradients_of_convolutions_are_eagers_strides_included(native, c, wanted):
    grad = torch.randn_like(torch.convolution(c.x, c.w, None, *eager_settings(c)))
    sizes = [grad.shape[1]]
    mask = [letter in wanted for letter in "iwb"]
    flags = (ctypes.c_int32 * 3)(*mask)
    values, count = numbers(sizes)
    out = [ctypes.c_void_p() for _ in range(3)]
    bias_sizes = ctypes.byref(ctypes.cast(values, ctypes.c_void_p))

    status = native.coexec_cpu_convolution_backward(
        handle(grad), handle(c.x), handle(c.w), bias_sizes, count, *settings_of(c),
        flags, ctypes.c_int64(3), *(ctypes.byref(o) for o in out),
    )  # fmt: skip

    expected = torch.ops.aten.convolution_backward(grad, c.x, c.w, sizes, *eager_settings(c), mask)
    assert status == 0
    for asked, mine, right in zip(mask, out, expected, strict=True):
        if asked:
            assert_like(tensor_of(mine), right)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, None]),
)
def test_uniform_numbers_and_the_generators_state_are_eagers(native, sizes, before, dtype):
    torch.manual_seed(len(sizes))
    torch.rand(before)
    state = torch.get_rng_state()
    expected = [torch.rand(size, dtype=dtype) for size in sizes]
    after = torch.get_rng_state()
    torch.set_rng_state(state)

    kind = None if dtype is None else ctypes.byref(ctypes.c_int32(core.scalar_type(dtype)))
    for size, right in zip(sizes, expected, strict=True):
        out = ctypes.c_void_p()
        assert native.coexec_cpu_rand(*numbers(size), kind, None, None, 0, None, ctypes.byref(out)) == 0
        mine = tensor_of(out)
        assert mine.dtype == right.dtype
        assert torch.equal(mine, right)

    assert torch.equal(torch.get_rng_state(), after)


def test_what_fails_in_a_part_is_the_calls_failure(native):
    a, b, out = torch.randn(300, 300), torch.randn(300, 300).double(), torch.empty(300, 300)

    assert native.coexec_cpu_mm_out(handle(out), handle(a), handle(b)) != 0
