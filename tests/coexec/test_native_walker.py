"""What the native walker answers by itself: with eager's results, and without Python."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import pytest
import torch

from coexec._native import core
from coexec._native.entry import EnteredNatively
from coexec.runners.python_runner import PythonRunner
from tests.coexec.harness import coexecuted, compare, linear, train

pytestmark = pytest.mark.skipif(core is None, reason="the native core is not built")

LOOKS = {"bool": bool, "float": float, "int": int, "item": torch.Tensor.item}
NUMBERS = {
    torch.float32: (0.0, -0.0, 2.75, -2.75),
    torch.float64: (0.1, 1e300),
    torch.bfloat16: (3.0,),
    torch.int64: (0, 2**53 + 1, -(2**63)),
    torch.uint8: (255,),
    torch.bool: (False, True),
}


@pytest.fixture
def asked(monkeypatch):
    """The functions of events that Python has answered."""
    names = []
    event = PythonRunner._event

    def note(self, function, *args):
        names.append(getattr(function, "__name__", str(function)))
        return event(self, function, *args)

    monkeypatch.setattr(PythonRunner, "_event", note)
    return names


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_that_python_looks_at_are_eagers(look, dtype, asked):
    numbers = NUMBERS[dtype]

    def step(s, k, tape):
        x = torch.tensor([numbers[k % len(numbers)]], dtype=dtype)
        with tape():
            seen = LOOKS[look](x.clone())
        return type(seen), seen

    report = compare(SimpleNamespace, step, 12)

    coexecuted(report, 9)
    assert asked == []


@pytest.mark.parametrize("look", [float, bool])
def test_what_is_no_finite_number_is_seen(look):
    def step(s, k, tape):
        x = torch.tensor([math.nan, math.inf, -math.inf][k % 3])
        with tape():
            return str(look(x * 2))

    coexecuted(compare(SimpleNamespace, step, 12), 9)


def test_the_integer_of_what_is_no_finite_number_is_eagers_error():
    def step(s, k, tape):
        x = torch.tensor(math.nan if k == 8 else 2.5)
        with tape():
            return int(x * 2)

    report = compare(SimpleNamespace, step, 12)

    assert report.steps["co-execution"] >= 6


def test_placeholders_that_python_made_are_known_where_c_looks_for_them(asked):
    def step(s, k, tape):
        x = torch.randn(64, 4)
        with tape():
            y = s.model(x)
            rows = y[x[:, 0] > 0]  # asks for its size, which is left to Python
            mine = y * 2
            both = rows.sum() + mine.sum()
            train(s, both + rows.square().sum())

    report = compare(linear, step, 20)

    coexecuted(report, 8)
    assert "__getitem__" in asked


@pytest.mark.parametrize("calls", [1, 40, 700])
def test_any_number_of_placeholders_is_told_apart(calls):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            made = [x]
            for i in range(calls):
                made.append(made[i // 2] + i)
            return sum(float(m.sum()) for m in made[:: max(calls // 3, 1)])

    coexecuted(compare(SimpleNamespace, step, 8), 5)


class Mode(EnteredNatively):
    outermost = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def by_name(mode, name):
    """What C code gets of an object by name."""
    get = ctypes.pythonapi.PyObject_GetAttrString
    get.restype, get.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.c_char_p)
    return get(mode, name)


def test_c_code_gets_of_a_mode_what_python_code_gets():
    mode, other = Mode(), Mode()
    with mode:
        assert by_name(mode, b"__torch_function__") is mode.__torch_function__
        assert by_name(mode, b"__torch_function__").__self__ is mode
        assert by_name(other, b"__torch_function__").__func__ is Mode.__torch_function__
        assert by_name(mode, b"lead").__func__ is Mode.lead
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            by_name(mode, b"nothing")
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    assert by_name(mode, b"__torch_function__").__func__ is Mode.__torch_function__
