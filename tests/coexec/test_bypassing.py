"""Tensors that reach autograd without passing a torch function: values, gradients and classes are eager's."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from coexec._native import core
from tests.coexec.harness import Twice, compare, linear, train, weights

pytestmark = [
    pytest.mark.skipif(core is None, reason="placeholders are seen above autograd by the native core"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]

twice = Twice.apply  # as programs have it from PyTorch's documentation


def gate(x):
    return x * x.sigmoid() + x


with warnings.catch_warnings():  # TorchScript is deprecated, and programs use it
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(gate)


def disabled(x):
    with torch._C.DisableTorchFunction():
        return x * x * 3


def disabled_on_two(x):
    y = x.tanh()
    with torch._C.DisableTorchFunction():
        return torch.stack([x, y]).sum(0) * y


class Layer(nn.Module):
    def forward(self, x):
        return F.softplus(x) * x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted_layer, traced_layer = torch.jit.script(Layer()), torch.jit.trace(Layer(), torch.randn(3))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


CALLS = {
    "an autograd function's apply from before": twice,
    "a reversed gradient": Reversed.apply,
    "a scripted function": scripted,
    "a scripted module": scripted_layer,
    "a traced module": traced_layer,
    "torch functions disabled": disabled,
    "a list of tensors with torch functions disabled": disabled_on_two,
}


@pytest.mark.parametrize("options", [{}, {"synchronous": False}, {"mode": "lazy"}], ids=str)
@pytest.mark.parametrize("every", [1, 6], ids=["in each step", "in some steps"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_reach_what_was_computed_before(name, every, options):
    def step(s, k, tape):
        x = torch.full((3,), 1.0 + k)
        with tape():
            y = x * s.a
            if k % every == every - 1:
                y = CALLS[name](y)
            s.a.grad = None
            (y.square().sum() + s.a.sum()).backward()
            s.log.append(y.detach().sum())

    compare(weights("a"), step, 14, **options)


def test_an_encoder_trains_behind_a_reversal_of_gradients():
    reverse = Reversed.apply

    def make():
        state = linear()
        state.head = nn.Linear(3, 1)
        return state

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            features = s.model(x)
            train(s, s.head(reverse(features)).square().mean() + features.square().mean())

    compare(make, step, 10)


def test_a_function_that_uses_a_tensor_twice_sees_one_tensor():
    def step(s, k, tape):
        with tape():
            y = s.a.exp()
            with torch._C.DisableTorchFunction():
                z = y * y + y
            z.sum().backward()
            s.log.append((z.detach(), y.detach()))

    compare(weights("a"), step, 9)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("every", [1, 6], ids=["in each step", "in some steps"])
def test_a_result_gets_another_class(every):
    def step(s, k, tape):
        with tape():
            y = s.a * (k + 1.0)
            if k % every == every - 1:
                y = y.as_subclass(Marked) * 2
            s.a.grad = None
            y.sum().backward()
            s.log.append((type(y).__name__, y.detach().as_subclass(torch.Tensor)))

    compare(weights("a"), step, 14)


def set_to(w):
    other = torch.zeros(3)
    other.set_(w)
    return other


USES = {
    "set_": set_to,
    "a scripted function": scripted,
    "torch.tensor": lambda w: torch.tensor(w),
    "torch.func.grad": lambda w: torch.func.grad(lambda v: v.square().sum())(w),
    "as_subclass": lambda w: w.as_subclass(Marked) * 2,
    "an autograd function": twice,
    "torch functions disabled": disabled,
    "from_dlpack": torch.from_dlpack,
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("of", ["a parameter", "a result"])
@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_tensor_behind_the_block_waits_for_it(name, of):
    def make():
        return SimpleNamespace(w=torch.ones(3), wide=torch.eye(200), log=[])

    def step(s, k, tape):
        with tape():
            b = s.wide
            for _ in range(6):
                b = b @ s.wide
            s.w.mul_(1.5).add_(b[0, 1])
            y = s.w * 2
        used = USES[name](s.w if of == "a parameter" else y)
        s.log.append(used.as_subclass(torch.Tensor).clone())

    compare(make, step, 7, every=7, synchronous=False)


def test_tensors_that_are_set_to_one_memory_keep_the_results_from_before():
    def make():
        return SimpleNamespace(a=torch.zeros(2), b=torch.ones(2), log=[])

    def step(s, k, tape):
        x = torch.randn(2, 2)
        if k == 9:
            s.b.set_(s.a)
        with tape():
            s.a.add_(x[0])
            r = s.b * 2
            s.b.mul_(0.5)
            q = s.a + 1
        s.log.append((r, q))

    compare(make, step, 14, every=14, synchronous=False)


factor = 0.0
made = []


@torch.library.custom_op("coexec_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    made.append(float(x.sum()))
    return x * factor


@pytest.mark.parametrize("options", [{}, {"synchronous": False}], ids=str)
def test_an_operation_in_python_runs_in_the_programs_order(options):
    def step(s, k, tape):
        global factor
        with tape():
            factor = float(k)
            y = scaled(s.a.detach() * 2)
            factor = -1.0
            s.log.append((len(made), made[-1], y))

    def make():
        made.clear()
        return weights("a")()

    compare(make, step, 10, **options)


def test_a_process_that_ends_with_a_pending_iteration_ends_well():
    program = """
import torch, coexec
w, wide = torch.ones(2), torch.eye(300)
for _ in range(6):
    with coexec.GradientTape(synchronous=False):
        b = wide
        for _ in range(5):
            b = b @ wide
        w.mul_(0.9).add_(b[0, 1])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 6], ids=["in each step", "in some steps"])
def test_flex_attention_runs_in_a_block(every):
    def step(s, k, tape):
        x = torch.randn(1, 2, 16, 3)
        with tape():
            q = x * s.a
            y = flex_attention(q, q, q) if k % every == every - 1 else q * 2
            s.a.grad = None
            y.square().sum().backward()

    compare(weights("a"), step, 9)


CONTROL_FLOW = {
    "cond": lambda y: torch.cond(y.sum() > 2, lambda v: v * 2, lambda v: v * 3, (y,)),
    "while_loop": lambda y: (
        y + torch._higher_order_ops.while_loop(lambda a: a.sum() < 9, lambda a: (a + 1,), (y.detach(),))[0]
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 6], ids=["in each step", "in some steps"])
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_operators_for_control_flow_run_in_a_block(name, every):
    def operator(y):  # found when it is called, as programs do
        return CONTROL_FLOW[name](y)

    def step(s, k, tape):
        with tape():
            y = s.a * (k + 1.0)
            if k % every == every - 1:
                y = operator(y)
            s.a.grad = None
            (y.sum() + s.a.sum()).backward()
            s.log.append(y.detach() * 1)

    compare(weights("a"), step, 8)


CONTEXTS = {
    "torch.func.grad": lambda s, x: torch.func.grad(lambda v: (s.model(v) * s.kept).sum())(x),
    "torch.func.jvp": lambda s, x: torch.func.jvp(lambda v: v @ s.model.weight.t(), (x,), (x,))[1],
    "inference mode": lambda s, x: torch.inference_mode()(s.model)(x).clone(),
    "no gradients": lambda s, x: torch.no_grad()(s.model)(x),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_results_are_the_same_wherever_they_are_first_used_behind_the_block(name):
    def step(s, k, tape):
        x = torch.randn(2, 4)
        with tape():
            h = s.model(x)
            train(s, h.square().mean())
            s.kept = h.detach() * 2
        s.log.append(CONTEXTS[name](s, x).sum().item())
        s.extra = (s.kept * s.model(x)).sum()
        s.extra.backward()
        s.extra = s.extra.detach()
        s.log.append(s.model.weight.grad.sum().item())

    compare(linear, step, 7, every=7, synchronous=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_forked_process_trains_on(synchronous):
    program = f"""
import os, torch, coexec
torch.set_num_threads(1)
w, wide = torch.ones(2, requires_grad=True), torch.eye(200)
def step():
    with coexec.GradientTape(synchronous={synchronous}):
        b = wide
        for _ in range(5):
            b = b @ wide
        w.grad = None
        (w * 2 + b[0, 1]).sum().backward()
for _ in range(6):
    step()
child = os.fork()
assert w.grad.tolist() == [2.0, 2.0]
for _ in range(6):
    step()
assert w.grad.tolist() == [2.0, 2.0]
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


library = torch.library.Library("coexec_tests", "FRAGMENT")
library.define("tripled(Tensor x) -> Tensor")
library.impl("tripled", lambda x: x * 3, "CPU")  # and nothing for autograd


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_autograd_looks_into_an_operation_in_python_without_a_formula():
    def step(s, k, tape):
        with tape():
            y = s.a * (k + 1.0)
            z = torch.ops.coexec_tests.tripled(y)
            s.a.grad = None
            (z.sum() + y.sum()).backward()
            s.log.append(z.detach() * 1)

    compare(weights("a"), step, 9)
