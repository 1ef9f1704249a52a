"""Tensors with gaps and overlaps in memory: where coexec copies one, kernels round as they do in eager."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import coexec
from coexec.tracegraph import copies
from coexec.tracegraph.copies import copied, overwrite
from coexec.tracegraph.exposed import expose
from tests.coexec.harness import coexecuted, compare, native

#: Views of a matrix of 66 rows and 211 columns.
LAYOUTS = {
    "every other column": lambda m: m[:, ::2],
    "turned": lambda m: m.t()[::2],
    "some columns": lambda m: m[:, 1:50],
    "one column": lambda m: m[:, 0],
    "an expanded column": lambda m: m[:, :1].expand(-1, 99),
    "an expanded row": lambda m: m[0].expand(77, -1),
    "permuted": lambda m: m.view(33, 2, 211).permute(2, 0, 1)[::2],
    "overlapping": lambda m: m.as_strided((60, 70), (3, 1)),
}


def shrinking(x):
    """Results that sum in an order which depends on how the argument lies in memory."""
    return [
        x.sum(),
        x.sum(0),
        x.sum(-1),
        x.mean(),
        x.var(),
        x.norm(),
        x.prod(-1),
        x.cumsum(0),
        x @ torch.linspace(0, 1, x.shape[-1]),
        F.linear(x, torch.linspace(0, 1, 3 * x.shape[-1]).view(3, -1)),
        x.softmax(-1),
        x.logsumexp(0),
        x.exp().sum(),
        x @ torch.ones(x.shape[-1], 5) / 3,
        F.layer_norm(x, x.shape[-1:]),
        x.mT @ x if x.dim() > 1 else x.dot(x),
        (x.flatten() * 1.1).sum(),
    ]


def weight():
    return SimpleNamespace(w=torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("way", ["native", "interpreted", "lazy", "ahead"])
@pytest.mark.parametrize("memory", ["held", "known to NumPy"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_is_fed_is_rounded_as_in_eager_wherever_it_lies(layout, memory, way, use_runner):
    def step(s, k, tape):
        matrix = torch.randn(66, 211) * 100
        s.kept = matrix if memory == "held" else matrix.numpy()
        x = layout(matrix)
        with tape():
            s.w.grad = None
            s.results = shrinking(x)
            (s.w * x.mean()).sum().backward()

    options = {"lazy": {"mode": "lazy"}, "ahead": {"synchronous": False}}.get(way, {})
    if way == "interpreted":
        use_runner(way)

    assert coexecuted(compare(weight, step, 8, **options), 5)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize(
    "view",
    [lambda c: c.conj(), lambda c: c.mH, lambda c: c.conj().imag, lambda c: c.conj().imag[:, 1:]],
    ids=["conjugated", "adjoint", "negated", "negated with gaps"],
)
def test_what_is_fed_may_be_conjugated_or_negated_when_it_is_read(view, synchronous, known):
    def step(s, k, tape):
        matrix = torch.randn(4, 3, dtype=torch.complex64)
        s.kept = matrix.numpy() if known else matrix
        x = view(matrix)
        with tape():
            s.w.grad = None
            s.results = [x * 2, x.sum(0), (x + 1).abs().sum()]
            (s.w.sum() * s.results[-1]).backward()

    assert coexecuted(compare(weight, step, 8, synchronous=synchronous), 5)


@pytest.mark.parametrize("layout", ["every other column", "turned", "some columns", "one column", "permuted"])
def test_what_is_written_and_read_is_rounded_as_in_eager_wherever_it_lies(layout, compared_on_the_graph):
    def make():
        state = weight()
        state.x = LAYOUTS[layout](torch.randn(66, 211) * 100)
        return state

    def step(s, k, tape):
        with tape():
            s.x.mul_(0.9)
            s.results = shrinking(s.x)
            s.x.add_(0.1)
            s.seen = s.x.sum().item()

    assert coexecuted(compared_on_the_graph(make, step, 8), 5)
    [state] = coexec.programs.all_states()
    assert state.skeleton.program.shadowed  # a copy is written before the commit


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_is_sent_call_by_call_is_rounded_as_in_eager_wherever_it_lies(layout, dynamic):
    def step(s, k, tape):
        matrix = torch.randn(66, 211) * 100
        s.kept = matrix.numpy()
        x = layout(matrix)
        with tape():
            s.results = shrinking(x)

    assert compare(weight, step, 6).phase == "dynamic"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_iteration_falls_back_behind_an_input_that_numpy_knows(layout):
    def step(s, k, tape):
        matrix = torch.randn(66, 211)
        s.array = matrix.numpy()
        x = layout(matrix)
        with tape():
            y = x * 2
            s.results = [y.sum(), (x.tanh() if k == 5 else x.exp()).sum()]

    report = compare(weight, step, 8)

    assert report.fallbacks == 1
    assert coexecuted(report, 3)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_an_array_has_eagers_strides_if_its_memory_is_written_later(layout, compared):
    def step(s, k, tape):
        matrix = torch.randn(66, 211)
        with tape():
            y = matrix * 2
            array = layout(y).numpy()
            s.log = [array.strides, array.tobytes()]
            y.add_(1)
            s.total = y.sum()

    compared(weight, step, 6)


# --- copies ---------------------------------------------------------------------------------------------


VERSIONS = [pytest.param(copies.core, marks=native, id="native"), pytest.param(None, id="in Python")]


def copied_by(core, tensor):
    """A copy that the native core makes, or Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "core", core)
        return copied(tensor)


@st.composite
def strided(draw):
    """A tensor with whatever strides, on memory with something before it."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    start = draw(st.integers(0, 3))
    length = start + 1 + sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]))
    return torch.arange(length).to(dtype).as_strided(sizes, strides, start)


@pytest.mark.parametrize("core", VERSIONS)
@given(tensor=strided())
def test_a_copy_has_the_strides_and_values_and_memory_of_its_own(core, tensor):
    made = copied_by(core, tensor)

    assert torch.equal(made, tensor)
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.numel():
        assert made.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert made.data_ptr() % 64 == tensor.data_ptr() % 64
    assert not made.requires_grad


@pytest.mark.parametrize("core", VERSIONS)
@given(tensor=strided())
def test_what_is_overwritten_has_the_values_of_its_copy_again(core, tensor):
    before = copied_by(core, tensor)
    tensor.untyped_storage().fill_(1)

    overwrite(tensor, before)

    assert torch.equal(tensor, before)


@pytest.mark.parametrize("core", VERSIONS)
def test_a_copy_of_a_parameter_needs_no_gradient(core):
    parameter = torch.nn.Parameter(torch.randn(4, 6))

    made = copied_by(core, parameter[:, ::2])

    assert not made.requires_grad
    assert made.stride() == (6, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.uint8])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_arrays_are_compared_wherever_in_memory_they_begin(first, rows, dtype):
    memory = torch.ones(rows, 12).to(dtype)
    array = memory.numpy()
    tensor = memory[:, first : first + 8]

    exposure = expose(tensor, tensor)
    assert not exposure.written

    array[:, first + 7] = 2
    assert exposure.written == (rows > 0)


def test_one_row_of_an_array_is_fed_from_wherever_it_begins():
    def step(s, k, tape):
        s.array = torch.randn(1, 8).numpy()
        x = torch.from_numpy(s.array)[:, 1:5]
        with tape():
            s.w.grad = None
            (s.w * x.sum()).sum().backward()

    assert coexecuted(compare(weight, step, 8), 5)
