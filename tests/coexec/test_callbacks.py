"""Custom autograd functions and hooks run in every co-executed iteration, and gradients are eager's."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from coexec._private import VERSION
from tests.coexec.harness import Twice, checkpoints, coexecuted, compare, linear, train, weights

WAYS = [{}, {"synchronous": False}, {"mode": "lazy"}]


class Swish(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))


class Exp(torch.autograd.Function):
    """Saves its output, which autograd gives back as another object."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Intermediate(torch.autograd.Function):
    """Saves a tensor that is neither input nor output, and another as an attribute."""

    @staticmethod
    def forward(ctx, x):
        s = x.sigmoid()
        ctx.save_for_backward(s, None)
        ctx.scale = s.mean()
        return s * 2

    @staticmethod
    def backward(ctx, g):
        s, nothing = ctx.saved_tensors
        assert nothing is None
        return g * s * (1 - s) * ctx.scale


class SetUp(torch.autograd.Function):
    """Has a `setup_context`, a default, and an argument that is no tensor."""

    @staticmethod
    def forward(x, power=2):
        return x**power, x.abs()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx, g, h):
        x, a = ctx.saved_tensors
        return g * ctx.power * x ** (ctx.power - 1) + h * x.sign() + 0 * a, None


class StraightThrough(torch.autograd.Function):
    """Passes the gradient on as it is."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Reversal(torch.autograd.Function):
    """Returns a view of its input."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.weight, None


class Itself(torch.autograd.Function):
    """Returns its input."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Scaled(torch.autograd.Function):
    """Has a number in its context."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


class InPlace(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Partly(torch.autograd.Function):
    """Has outputs that are not differentiable, and looks at which gradients are needed."""

    @staticmethod
    def forward(ctx, x, w, flag):
        ctx.set_materialize_grads(False)
        values, indices = (x * w).topk(2)
        mask = values > 0
        ctx.mark_non_differentiable(indices, mask)
        ctx.save_for_backward(x, w, indices)
        return values, indices, mask, "text"

    @staticmethod
    def backward(ctx, g, no_indices, no_mask, no_text):
        assert [no_indices, no_mask, no_text] == [None] * 3
        x, w, indices = ctx.saved_tensors
        spread = torch.zeros_like(x).scatter(-1, indices, g)
        return (
            spread * w if ctx.needs_input_grad[0] else None,
            (spread * x).sum(0) if ctx.needs_input_grad[1] else None,
            None,
        )


class Outer(torch.autograd.Function):
    """Uses another custom function in both directions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Swish.apply(x) + Exp.apply(x * 0.1)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            Swish.apply(y).sum().backward()
        return g * y.grad


class Noisy(torch.autograd.Function):
    """Draws random numbers in both directions."""

    @staticmethod
    def forward(ctx, x):
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx, g):
        return g + torch.randn_like(g)


APPLIED = {
    "saves its input": lambda x: Swish.apply(x),
    "saves its output": lambda x: Exp.apply(x * 0.1),
    "saves an intermediate": Intermediate.apply,
    "sets up its context": lambda x: sum(SetUp.apply(x)) + SetUp.apply(x, 3)[0],
    "passes gradients on": lambda x: StraightThrough.apply(x) + StraightThrough.apply(x * 2),
    "one behind the other": lambda x: StraightThrough.apply(Swish.apply(StraightThrough.apply(Exp.apply(x)))),
    "returns a view": lambda x: Reversal.apply(x, 0.5),
    "returns its input": lambda x: Itself.apply(x) * 2 + x,
    "writes to its input": lambda x: InPlace.apply(x * 1) + 1,
    "draws": Noisy.apply,
    "nested": Outer.apply,
    "two branches with one gradient": lambda x: Swish.apply(x) + Exp.apply(x) + x,
    "without gradients": lambda x: x * Swish.apply(x.detach()),
    "unused": lambda x: (Swish.apply(x), x)[1],
}


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", APPLIED)
def test_a_custom_function_is_co_executed(name, options):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            loss = APPLIED[name](s.model(x)).square().mean()
            train(s, loss)
            s.log.append(loss.detach())

    coexecuted(compare(linear, step, 10, **options), 6)


def test_outputs_that_are_not_differentiable_are_what_they_are_in_eager():
    def step(s, k, tape):
        x = torch.randn(3, 4)
        with tape():
            values, indices, mask, text = Partly.apply(x, s.a, k)
            s.a.grad = None
            (values.sum() + mask.sum()).backward()
            s.log.append((values.requires_grad, indices.requires_grad, mask.requires_grad, text, indices + 0))

    coexecuted(compare(weights("a", size=4), step, 10), 6)


@pytest.mark.skipif(VERSION < (2, 13), reason="before PyTorch 2.13 custom functions take no names")
def test_arguments_may_have_names_where_the_context_is_set_up():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            train(s, (SetUp.apply(x=y)[0] + SetUp.apply(y, power=3)[0]).mean())

    coexecuted(compare(linear, step, 10), 6)


@pytest.mark.skipif(
    not hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype"), reason="PyTorch 2.14 has it"
)
def test_a_function_gets_gradients_in_the_type_that_it_asks_for():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            ctx.set_output_grad_dtype(torch.float32)
            return x.to(torch.bfloat16)

        @staticmethod
        def backward(ctx, g):
            ctx.log.append(str(g.dtype))
            return g, None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Half.apply(s.model(x), s.log).float().square().mean())

    coexecuted(compare(linear, step, 10), 6)


def test_a_backward_that_prints_and_counts_does_so_in_every_step():
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            log.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ctx.log.append("backward")
            print("called on", threading.current_thread() is threading.main_thread(), len(ctx.log))
            return g * 2, None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Counted.apply(s.model(x), s.log).square().mean())

    coexecuted(compare(linear, step, 10), 6)


def test_a_backward_can_look_at_values():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ctx.log.append(g.norm().item())
            return g.clamp(-0.01, 0.01), None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Looks.apply(s.model(x), s.log).square().mean())

    coexecuted(compare(linear, step, 10), 6)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("place", ["forward", "backward", "behind", "at the end"])
def test_another_path_is_taken_in(place, options):
    """The iteration falls back in the forward, in the middle of the backward pass, or behind it."""

    class Choosing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            y = x * 3 if other == "forward" else x * 2
            ctx.save_for_backward(x, y)
            ctx.other = other
            return y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            g = g + 0.1 * y
            if ctx.other == "backward":
                g = g * x.sign()
            return g * 2, None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        other = place if k in (5, 7, 9, 12) else ""
        with tape():
            y = Swish.apply(Choosing.apply(Exp.apply(s.model(x)), other))
            train(s, y.square().mean())
            if other == "behind":
                s.log.append(s.model.weight.norm().item())
                s.model.weight.grad.mul_(2)
            elif other == "at the end":
                s.log.append(y.detach())

    report = compare(linear, step, 16, **options)
    coexecuted(report, 6)
    assert report.fallbacks >= 1, report.summary()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_leaves_the_state_that_eager_leaves(where, caught):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, when):
            ctx.when = when
            if when == "forward":
                raise ValueError("in the forward")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            h = g * 2
            if ctx.when == "backward":
                raise ValueError("in the backward")
            return h, None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            s.optimizer.zero_grad()
            h = s.model(x)
            try:
                (Swish.apply(Raises.apply(h, where if k in (1, 6, 8) else "")).mean() + h.sum()).backward()
            except ValueError as e:
                s.log.append(str(e))
                if not caught:
                    raise
            s.optimizer.step()

    report = compare(linear, step, 12)
    assert report.steps.get("co-execution", 0) >= 2, report.summary()


def test_gradients_of_chosen_tensors():
    def step(s, k, tape):
        with tape() as t:
            y = Swish.apply(s.a * s.b)
            one, two = torch.autograd.grad(y.sum(), [s.a, s.b], retain_graph=True)
            three = t.gradient(y.square().sum(), s.a)
            s.log.append((one + 0, two + 0, three + 0))

    coexecuted(compare(weights("a", "b"), step, 10), 6)


def test_a_graph_that_is_kept_is_gone_through_twice():
    def step(s, k, tape):
        s.a.grad = None
        with tape():
            y = Exp.apply(Swish.apply(s.a))
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()

    coexecuted(compare(weights("a"), step, 10), 6)


def test_gradients_of_gradients_are_eagers():
    def step(s, k, tape):
        s.a.grad = None
        with tape():
            y = Swish.apply(s.a * 2)
            (g,) = torch.autograd.grad(y.sum(), s.a, create_graph=True)
            (y.sum() + g.square().sum()).backward()
            s.log.append(g.detach())

    compare(weights("a"), step, 10)


def test_a_backward_pass_behind_the_block_calls_the_function():
    def step(s, k, tape):
        s.a.grad = None
        with tape():
            y = Exp.apply(Swish.apply(s.a * 2)).sum()
        y.backward()

    compare(weights("a"), step, 8)


def test_a_backward_pass_sometimes_behind_the_block():
    def step(s, k, tape):
        s.a.grad = None
        with tape():
            y = Exp.apply(Swish.apply(s.a * 2)).sum()
            if k < 5:
                y.backward()
        if k >= 5:
            y.backward()

    compare(weights("a"), step, 10)


def test_layers_share_a_function_in_a_loop():
    def make():
        state = linear()
        state.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        state.optimizer = torch.optim.Adam(state.model.parameters(), 0.01)
        return state

    def step(s, k, tape):
        h = torch.randn(5, 4)
        with tape():
            for layer in s.model:
                h = h + Swish.apply(layer(h))
            train(s, h.square().mean())

    coexecuted(compare(make, step, 12), 6)


def test_the_number_of_rows_may_vary():
    def step(s, k, tape):
        x = torch.randn(3 + k % 5, 4)
        with tape():
            train(s, Exp.apply(Swish.apply(s.model(x))).mean())

    coexecuted(compare(linear, step, 24), 6)


def test_a_hinge_of_numbers_that_vary():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Scaled.apply(s.model(x), 0.3 + 0.1 * k).square().mean())

    coexecuted(compare(linear, step, 12), 5)


def test_autocast_reaches_the_backward():
    class Half(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.t() @ x

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            with torch.autocast("cpu", torch.bfloat16):
                y = Half.apply(x, s.model.weight)
            train(s, y.float().square().mean() + s.model(x).mean())

    compare(linear, step, 10)


def test_a_context_used_in_another_way_is_left_to_pytorch():
    class Names(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ctx.log.append(len(ctx.next_functions))
            return g * 2, None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Names.apply(s.model(x), s.log).square().mean())

    compare(linear, step, 8)


def test_what_is_saved_is_checked_for_writes():
    def step(s, k, tape):
        with tape():
            x = s.a * 2
            y = Swish.apply(x)
            if k == 6:
                x.add_(1)
            s.a.grad = None
            y.sum().backward()

    compare(weights("a"), step, 10)


def test_threads_of_the_engine_end():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Swish.apply(s.model(x)).mean())
            if k % 4 == 3:
                s.log.append(s.model.weight.sum().item())

    compare(linear, step, 12)
    assert not [t for t in threading.enumerate() if t.name == "coexec backward"]


# --- hooks ------------------------------------------------------------------------------------------


def _uses(value, y):  # not y itself: PyTorch would never free it
    y.register_hook(lambda g: g * value.tanh())


HOOKS = {
    "halves": lambda s, y: y.register_hook(lambda g: g * 0.5),
    "looks": lambda s, y: y.register_hook(lambda g: s.log.append(g.norm().item())),
    "keeps": lambda s, y: y.register_hook(lambda g: s.log.append(g)),
    "uses the tensor": lambda s, y: _uses(y.detach(), y),
    "draws": lambda s, y: y.register_hook(lambda g: g + torch.randn_like(g)),
    "two": lambda s, y: (y.register_hook(lambda g: g + 1), y.register_hook(lambda g: g.clamp(max=1.01))),
}


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_co_executed(name, options):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            HOOKS[name](s, y)
            train(s, Swish.apply(y).square().sum() + y.sum())

    coexecuted(compare(linear, step, 10, **options), 6)


def test_a_hook_that_is_removed_behind_the_backward_pass():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            handle = y.register_hook(lambda g: g * 0.5)
            train(s, y.square().sum())
            handle.remove()

    coexecuted(compare(linear, step, 10), 6)


@pytest.mark.parametrize("when", [{1, 2}, {6, 8}, set(range(12))], ids=str)
def test_a_hook_that_is_removed_before_the_backward_pass_is_not_called(when):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            handle = y.register_hook(lambda g: s.log.append(k))
            if k in when:
                handle.remove()
            train(s, y.square().sum())

    compare(linear, step, 12)


def test_hooks_come_and_go():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x).tanh()
            if k % 5 in (0, 2):
                y.register_hook(lambda g: g * 0.5)
            if k % 7 == 6:
                y.register_hook(lambda g: print(g.shape))
            train(s, y.square().sum())

    coexecuted(compare(linear, step, 24), 12)


def test_an_exception_in_a_hook_leaves_the_state_that_eager_leaves():
    def step(s, k, tape):
        def check(g):
            if k in (5, 7):
                raise RuntimeError("not this one")

        x = torch.randn(5, 4)
        with tape():
            s.optimizer.zero_grad()
            y = s.model(x)
            y.register_hook(check)
            (y.square().sum() + s.model.bias.sum()).backward()
            s.optimizer.step()

    report = compare(linear, step, 12)
    assert report.steps.get("co-execution", 0) >= 2, report.summary()


def test_a_hook_of_a_tensor_that_is_kept_can_be_removed_behind_the_block():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            s.handle = y.register_hook(lambda g: g * 0.5)
            train(s, y.square().sum())
            s.log.append(y.detach())
        s.handle.remove()
        del s.handle

    coexecuted(compare(linear, step, 10), 6)


# --- hooks on leaves ----------------------------------------------------------------------------------


def _halve(parameter):
    parameter.grad.mul_(0.5)


def _with_hooks(kind):
    def make():
        state = linear()
        calls = state.calls = []  # hooks do not hold the state: PyTorch would never free it
        weight, bias = state.model.weight, state.model.bias
        if kind == "on the gradient":
            weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
            bias.register_hook(lambda g: calls.append(g.norm().item()))
            bias.register_hook(lambda g: g * 0.5)
        elif kind == "behind the accumulation":
            weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.norm().item()))
            bias.register_post_accumulate_grad_hook(_halve)
        elif kind == "an optimizer in the backward pass":
            for p in state.model.parameters():
                mine = torch.optim.SGD([p], lr=0.1, momentum=0.9)

                def update(p, mine=mine):
                    mine.step()
                    mine.zero_grad()

                p.register_post_accumulate_grad_hook(update)
        return state

    return make


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(
    "kind", ["on the gradient", "behind the accumulation", "an optimizer in the backward pass"]
)
def test_hooks_of_parameters_are_co_executed(kind, options):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            if kind == "an optimizer in the backward pass":
                s.model(x).square().mean().backward()
            else:
                train(s, s.model(x).square().mean())

    coexecuted(compare(_with_hooks(kind), step, 12, **options), 6)


def test_hooks_of_parameters_come_and_go_between_steps():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        if k == 5:
            s.handle = s.model.weight.register_hook(lambda g: g * 0.5)
            s.other = s.model.bias.register_hook(lambda g: s.log.append(k))
        if k == 10:
            s.handle.remove()
            s.other.remove()
            del s.handle, s.other
        with tape():
            train(s, s.model(x).square().mean())

    coexecuted(compare(linear, step, 20), 8)


@pytest.mark.parametrize("kind", ["on the gradient", "behind the accumulation"])
def test_an_iteration_with_hooks_of_parameters_falls_back(kind):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Swish.apply(s.model(x)).square().mean())
            if k % 5 == 4:
                s.log.append(s.model.weight.norm().item())

    report = compare(_with_hooks(kind), step, 16)
    coexecuted(report, 6)
    assert report.fallbacks == 1


def test_a_hook_of_a_parameter_that_raises_leaves_the_state_that_eager_leaves():
    def make():
        state = linear()

        def check(p, log=state.log):
            if len(log) in (5, 7):
                raise RuntimeError("not this one")

        state.model.weight.register_post_accumulate_grad_hook(check)
        return state

    def step(s, k, tape):
        x = torch.randn(5, 4)
        s.log.append(k)
        with tape():
            s.optimizer.zero_grad()
            s.model(x).square().mean().backward()
            s.optimizer.step()

    report = compare(make, step, 12)
    assert report.steps.get("co-execution", 0) >= 2, report.summary()


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True
@pytest.mark.parametrize("kind", ["a hook of a leaf", "a hook", "a function"])
def test_code_that_a_backward_pass_with_a_graph_calls_is_called_in_every_step(kind):
    class Logs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            ctx.log.append("called")
            return g, None

    def make():
        state = weights("a")()
        if kind == "a hook of a leaf":
            state.a.register_hook(lambda g: state.log.append("called"))
        return state

    def step(s, k, tape):
        s.a.grad = None
        with tape():
            y = s.a.square()
            if kind == "a hook":
                y.register_hook(lambda g: s.log.append("called"))
            elif kind == "a function":
                y = Logs.apply(y, s.log)
            y.sum().backward(create_graph=True)
            s.a.grad = s.a.grad.detach()

    compare(make, step, 10)


def test_hooks_of_modules_are_called_in_every_step():
    def make():
        state = linear()
        state.model.register_full_backward_hook(lambda m, i, o: state.log.append(len(i)))
        state.model.register_full_backward_pre_hook(lambda m, o: state.log.append(o[0].norm().item()))
        return state

    def step(s, k, tape):
        x = torch.randn(5, 4, requires_grad=k % 3 == 0)
        with tape():
            train(s, s.model(x).square().mean())

    compare(make, step, 10)


class Queues(torch.autograd.Function):
    """Has the engine call something at the end of the backward pass."""

    @staticmethod
    def forward(ctx, x, log, leaf):
        ctx.log, ctx.leaf = log, leaf
        return x * 2

    @staticmethod
    def backward(ctx, g):
        def at_end():
            ctx.log.append(("at the end", torch.is_grad_enabled(), ctx.leaf.grad.norm().item()))

        ctx.log.append("called")
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        return g * 2, None, None


def _next_functions(ctx):
    return len(ctx.next_functions)


@pytest.mark.parametrize("when", [{1, 2}, {6, 8}, set(range(12))], ids=str)
def test_what_only_a_real_context_has_is_looked_at_in_another_function(when):
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k, log):
            ctx.k, ctx.log = k, log
            return x * 2

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            h = g * 2
            if ctx.k in when:
                ctx.log.append(_next_functions(ctx))
            ctx.log.append(hasattr(ctx, "nothing"))
            return h, None, None

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, Hidden.apply(s.model(x), k, s.log).square().mean())

    compare(linear, step, 12)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("fallback", [False, True])
def test_what_is_queued_for_the_end_of_a_backward_pass_is_called_there(fallback, options):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            s.optimizer.zero_grad()
            y = Queues.apply(Queues.apply(s.model(x), s.log, s.model.bias), s.log, s.model.weight)
            y.square().mean().backward()
            s.log.append("behind")
            if fallback and k in (5, 9):
                s.log.append(s.model.weight.grad.norm().item())
            s.optimizer.step()

    coexecuted(compare(linear, step, 14, **options), 6)


def test_nothing_is_queued_outside_of_a_backward_pass():
    def step(s, k, tape):
        with tape():
            s.a.grad = None
            s.a.square().sum().backward()
            if k in (1, 6):
                torch.autograd.Variable._execution_engine.queue_callback(print)

    compare(weights("a"), step, 10)


# --- found by trying to break it ------------------------------------------------------------------------


def test_a_gradient_that_a_hook_keeps_is_not_reused_by_autograd():
    def make():
        state = weights("a")()
        state.a.register_hook(lambda g: setattr(state, "kept", g))
        return state

    def step(s, k, tape):
        x = torch.rand(3)
        with tape():
            s.a.grad = None
            (s.a * x).sum().backward()
            s.a.grad.mul_(2)
            if k in (5, 7):
                s.log.append(s.a.grad.sum().item())

    coexecuted(compare(make, step, 12), 4)


@pytest.mark.parametrize("hooks", [1, 2])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_hook_of_a_leaf_removes_a_hook(hooks, options):
    def make():
        state = weights("a")()
        state.calls = []

        def first(g):
            state.calls.append(len(state.calls))
            if len(state.calls) in (2, 9):
                state.handle.remove()
            return g * 0.5

        state.add = lambda: setattr(state, "handle", state.a.register_hook(first))
        state.add()
        if hooks > 1:
            state.a.register_hook(lambda g: g + 1)
        return state

    def step(s, k, tape):
        if k == 5:
            s.handle.remove()
            s.add()
        with tape():
            s.a.grad = None
            (s.a * 3).sum().backward()
            s.log.append(s.a.grad + 0)

    compare(make, step, 16, **options)


def test_a_leaf_with_hooks_becomes_another_one():
    def make():
        state = weights("p")()
        state.q = state.p
        state.p.register_hook(lambda g: (state.log.append(1), g * 2)[1])
        return state

    def step(s, k, tape):
        if k in (6, 7, 11):
            s.p, s.q = torch.ones(3, requires_grad=True), s.p
        with tape():
            s.p.grad = s.q.grad = None
            (s.p.sin() + s.q * 2).sum().backward()

    compare(make, step, 14)


def test_a_replay_for_what_no_trace_can_hold_runs_no_code_again():
    def step(s, k, tape):
        x = np.ones((5, 4), np.float32)
        with tape():
            y = s.model(torch.from_numpy(x))
            y.register_hook(lambda g: s.log.append(k))
            train(s, Swish.apply(y).square().sum())
            if k in (5, 8):
                x += 1
                s.log.append(s.model(torch.from_numpy(x)).sum().item())

    compare(linear, step, 12)


@pytest.mark.parametrize("leaf", [False, True])
def test_an_error_names_the_hook(leaf):
    def make():
        state = linear()

        def too_small(g):
            return g[:1] if len(state.log) in (1, 6) else g

        state.hook = too_small
        if leaf:
            state.model.weight.register_hook(too_small)
        return state

    def step(s, k, tape):
        s.log.append(k)
        x = torch.randn(5, 4)
        with tape():
            y = s.model(x)
            if not leaf:
                y.register_hook(s.hook)
            train(s, y.square().sum())

    compare(make, step, 10)


# --- hooks of modules ---------------------------------------------------------------------------------


MODULE_HOOKS = {
    "sees": lambda s, m: m.register_full_backward_hook(
        lambda m, i, o: s.log.append((len(i), o[0].norm().item()))
    ),
    "changes": lambda s, m: m.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,)),
    "keeps": lambda s, m: m.register_full_backward_hook(
        lambda m, i, o: s.log.append(([t + 0 for t in i], [t * 1 for t in o]))
    ),
    "before": lambda s, m: m.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,)),
    "both": lambda s, m: (
        m.register_full_backward_pre_hook(lambda m, o: s.log.append("before")),
        m.register_full_backward_hook(lambda m, i, o: s.log.append("behind")),
    ),
}


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", MODULE_HOOKS)
def test_hooks_of_modules_are_co_executed(name, options):
    def make():
        state = linear()
        state.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        state.optimizer = torch.optim.SGD(state.model.parameters(), 0.1)
        MODULE_HOOKS[name](state, state.model[2])
        MODULE_HOOKS[name](state, state.model[1])
        return state

    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            train(s, s.model(x).square().mean())

    coexecuted(compare(make, step, 12, **options), 6)


def test_hooks_of_modules_come_and_go():
    def step(s, k, tape):
        if k == 5:
            s.handle = s.model.register_full_backward_hook(lambda m, i, o: s.log.append(k))
        elif k == 12:
            s.handle.remove()
            del s.handle
        x = torch.randn(5, 4, requires_grad=True)
        with tape():
            train(s, s.model(x).square().mean())
            if k in (8, 10):
                s.log.append(s.model.weight.norm().item())

    coexecuted(compare(linear, step, 20), 8)


def test_a_node_has_what_its_function_gave_to_the_context():
    def step(s, k, tape):
        with tape():
            y = Scaled.apply(s.a, 0.5 + k)
            if k % 2:
                s.log.append((y.grad_fn.scale, hasattr(y.grad_fn, "nothing"), y.grad_fn.name()))
        if k > 3:
            s.log.append((y.grad_fn.scale, hasattr(y.grad_fn, "nothing"), type(y.grad_fn).__name__))
        y.sum().backward()

    compare(weights("a"), step, 8)


def test_other_things_of_a_node_are_looked_at_in_eager_execution():
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            y = Swish.apply(s.model(x))
            s.log.append(y.grad_fn.name())
            if k in (1, 6):
                s.log.append(len(y.grad_fn.next_functions))
            train(s, y.square().mean())

    coexecuted(compare(linear, step, 12), 4)


@pytest.mark.parametrize("kind", ["function", "hook", pytest.param("checkpoint", marks=checkpoints)])
def test_an_iteration_falls_back_at_its_end_behind_a_backward_pass_that_called_the_user(kind):
    """A result that outlives an iteration for the first time shows only when all has been let go."""

    def step(s, k, tape):
        x = torch.randn(5, 4)

        def block():
            h = s.model(x)
            if kind == "function":
                h = Twice.apply(h)
            elif kind == "checkpoint":
                h = checkpoint(torch.tanh, h, use_reentrant=False)
            else:
                h.register_hook(lambda g: g * 2)
            loss = h.square().mean()
            train(s, loss)
            return loss if k in (9, 10) else None

        with tape():
            s.kept = block()

    report = compare(linear, step, 14)

    assert report.fallbacks >= 1, report.summary()
    assert coexecuted(report, 6)
