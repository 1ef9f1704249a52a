"""Views, aliases and in-place writes; memory that Python reaches behind torch's back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from coexec.tracegraph.exposed import expose
from tests.coexec.harness import Twice, coexecuted, compare, linear, nothing, train, weights


def test_a_target_that_shared_memory_with_the_input_so_far_need_not_for_ever():
    def step(s, k, tape):
        x = torch.randn(4)
        target = x.detach() if k < 4 else torch.randn(4)
        with tape():
            return (x * 2 - target).sum()

    compare(nothing, step, 8)


def tied():
    s = SimpleNamespace(a=torch.randn(3))
    s.b = s.a.view(3)
    return s


@pytest.mark.parametrize("write", [False, True])
def test_tied_tensors_may_be_untied(write):
    def step(s, k, tape):
        if k == 5:
            s.b.data = torch.randn(3)
        with tape():
            if write:
                s.a.add_(1)
            return s.a * 2 + s.b, s.b * 3

    compare(tied, step, 8)


def test_untied_tensors_may_be_tied_and_looked_at():
    def step(s, k, tape):
        if k == 5:
            s.b.data = s.a.data
        if k == 8:
            s.b.data = s.a.data.clone()
        with tape():
            s.a.add_(1)
            print(s.b.sum())
            s.b.mul_(2)

    compare(lambda: SimpleNamespace(a=torch.randn(3), b=torch.randn(3)), step, 10)


def test_inputs_may_share_memory_for_the_first_time_and_be_looked_at():
    def step(s, k, tape):
        x = torch.randn(4)
        target = x.view(4) if k == 5 else torch.randn(4)
        with tape():
            x.add_(1)
            print(target.sum())
        return x, target

    compare(nothing, step, 8, check=False)


def test_inputs_that_share_memory_in_some_iterations_leave_a_graph_that_keeps_the_rules():
    def step(s, k, tape):
        x = torch.randn(4)
        target = x.view(4) if k % 2 else torch.randn(4)
        with tape():
            y = x * 2
            z = target * 3
        return y, z

    compare(nothing, step, 8)


def test_a_transposition_in_place_leaves_the_detached_tensor_as_it_was():
    def step(s, k, tape):
        x = torch.randn(3, 3)
        with tape():
            y = x * 2
            z = y.detach()
            y.t_()
            return z[0] * 1, y[0] * 1

    compare(nothing, step, 6)


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "squeeze_"])
def test_shapes_changed_in_place_are_seen_by_python(change):
    def step(s, k, tape):
        x = torch.randn(1, 3)
        with tape():
            y = x * 2
            getattr(y, change)(*([0] if "squeeze" in change else []))
            print(y.shape, y.stride(), y.dim())
        return y

    compare(nothing, step, 6)


def test_an_out_argument_that_is_resized_has_its_new_shape():
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            out = torch.empty(0)
            torch.add(x, 2, out=out)
            print(out.shape, out.numel())
        return out

    compare(nothing, step, 6)


def test_a_computed_tensor_given_other_data_has_its_shape():
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x * 2
            y.data = (x * 3)[:2]
            print(y.shape)
            return y, y + 1

    compare(nothing, step, 6)


def test_out_arguments_write_to_what_they_are_given(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            torch.add(x, 1, out=s.c)
            d = torch.empty(3)
            torch.mul(x, s.c, out=d)
            print(d)
        return d

    assert coexecuted(compared(lambda: SimpleNamespace(c=torch.zeros(3)), step, 8), 5)


def test_a_kept_view_of_another_dtype_of_a_written_input():
    def step(s, k, tape):
        x = torch.randn(4)
        with tape():
            x.add_(1)
            print(x.sum())
            y = x.view(torch.int32)
        return x, y

    compare(nothing, step, 6)


@pytest.mark.parametrize("look", [False, True])
def test_lazy_conjugation_is_seen(look):
    def step(s, k, tape):
        x = torch.randn(3, dtype=torch.complex64)
        with tape():
            y = (x * 2).conj()
            if look:
                print(y, y.imag)
        return y

    compare(nothing, step, 6)


def test_writes_through_views_and_bases_are_seen_through_each_other(compared):
    def step(s, k, tape):
        x = torch.randn(4)
        with tape():
            view = x[1:3]
            x.mul_(2)
            print(view)
            view.zero_()
            print(x)
            y = view + 1
        return view, y, x

    assert coexecuted(compared(nothing, step, 8), 5)


def test_kept_views_of_one_result_share_memory(compared):
    def step(s, k, tape):
        x = torch.randn(4)
        with tape():
            a = x * 2
            b = a.view(2, 2)
            c, d = b[0], b.t()
            b.add_(1)
        a.add_(1)
        return a, b, c, d

    assert coexecuted(compared(nothing, step, 8), 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(20)[3:15].view(3, 4)[:, 1:3],
        lambda: torch.randn(6)[::2],
    ],
)
def test_an_input_of_any_geometry_is_written_looked_at_and_written_again(compared, make):
    def step(s, k, tape):
        x = make()
        with tape():
            x.add_(1)
            print(x.sum())
            y, z, u = x * 2, x[1], x.t() if x.dim() > 1 else x[1:]
            x.mul_(3)
            w = torch.cat([x, x])
        return x, x._base, y, z, u, w

    assert coexecuted(compared(nothing, step, 8), 5)


def test_parameters_written_through_data_and_looked_at(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            s.w.data.mul_(1.5)
            print(s.w)
            s.w.data[0] = 7
            s.w.data.copy_(x)
            s.c[1:].add_(s.w.detach()[:2])
            print(s.c)
        return s.w

    def make():
        return SimpleNamespace(c=torch.zeros(3), w=torch.nn.Parameter(torch.ones(3)))

    assert coexecuted(compared(make, step, 8), 5)


def test_the_data_of_a_parameter_that_nothing_writes_prints_without_gradient():
    def step(s, k, tape):
        with tape():
            print(s.w.data, s.w.detach())

    compare(weights("w"), step, 6)


def test_a_detached_parameter_sees_the_update_and_a_clone_does_not(compared):
    def step(s, k, tape):
        with tape():
            view = s.w.detach()
            old = view.clone()
            with torch.no_grad():
                s.w.add_(1)
            print(view, old, s.w)
            with torch.no_grad():
                s.w.mul_(2)
        return view, old

    assert coexecuted(compared(weights("w"), step, 8), 5)


def test_a_batch_object_that_is_reused_in_place(compared):
    def step(s, k, tape):
        s.x.copy_(torch.randn(4))
        with tape():
            y = s.x * 2
            s.x.add_(1)
            z = s.x * 3
        return y, z

    assert coexecuted(compared(lambda: SimpleNamespace(x=torch.randn(4)), step, 8), 5)


def test_batches_that_are_slices_of_one_tensor(compared):
    def step(s, k, tape):
        x, leaf = s.data[4 * k : 4 * k + 4], s.data[4 * k + 2 : 4 * k + 6].detach().requires_grad_()
        with tape():
            x.add_(1)
            print(x.sum())
            y, z = x[1:], x.view(2, 2).t()[0]
            (leaf.view(2, 2).t()[0] ** 2).sum().backward()
        y.add_(3)
        return x, y, z, leaf.grad

    compared(lambda: SimpleNamespace(data=torch.randn(50)), step, 8)


def test_overlapping_slices_are_written_and_looked_at(compared):
    def step(s, k, tape):
        a, b = s.data[k : k + 4], s.data[2 * k : 2 * k + 4]
        with tape():
            a.add_(1)
            print(b)
            b.mul_(2)
            c = a + 1
        return c

    compared(lambda: SimpleNamespace(data=torch.randn(50)), step, 8)


def test_a_row_that_a_number_selects_is_kept():
    def step(s, k, tape):
        with tape():
            y = s.data[k % 4] * 2
            s.data[k % 4] += 1
            z = s.data[(k + 1) % 4]
            print(z)
        return y, z

    compare(lambda: SimpleNamespace(data=torch.randn(4, 3)), step, 10)


def test_one_tensor_in_two_roles_in_some_iterations(compared):
    def step(s, k, tape):
        a = torch.randn(4)
        b = a if k % 2 else torch.randn(4)
        with tape():
            y = a * 2 + b
            a.add_(1)
            z = b * 3
        return y, z

    assert coexecuted(compared(nothing, step, 10), 4)


def test_an_input_that_is_both_arguments_of_a_call_is_coexecuted():
    def step(s, k, tape):
        x = torch.randn(3, 3)
        with tape():
            return x @ x

    assert coexecuted(compare(nothing, step, 8), 4)


def test_state_that_is_replaced_by_a_new_tensor_in_each_iteration(compared):
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            old = s.h
            s.h = s.h * 0.9 + x
            old.add_(5)
            print(old)
        return old

    assert coexecuted(compared(lambda: SimpleNamespace(h=torch.zeros(3)), step, 10), 6)


def test_state_and_its_view_are_carried_to_the_next_iteration():
    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            s.h = s.h * 0.9 + x
            y = s.v.sum() + s.h.sum()
            s.v = s.h.view(3)
            print(y)

    compare(lambda: SimpleNamespace(h=torch.zeros(3), v=torch.zeros(3)), step, 8)


def test_expanded_empty_and_zero_dimensional_tensors(compared):
    def step(s, k, tape):
        x, t, u = torch.randn(0, 3), torch.tensor(2.0 + k), torch.tensor(k, dtype=torch.float64)
        e = torch.randn(1).expand(3)
        with tape():
            a, c, d = x * t, t * u, torch.randn(3) * u
            f = torch.cat([x, d[None]])
            print(x.sum(), c.item(), float(t), e)
            out = (a, a.sum(0), c, d, f, e * 2, e.clone().add_(1))
        return out

    assert coexecuted(compared(nothing, step, 6), 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex128])
def test_other_dtypes(compared, dtype):
    def step(s, k, tape):
        x, y = torch.randn(3, dtype=dtype), torch.randn(3)
        with tape():
            out = x * (0.1 * k + 0.05), x + y, x.abs(), x.to(torch.complex64).real
            print(x, out[0], out[1].tolist())
        return out

    assert coexecuted(compared(nothing, step, 6), 2)


def test_an_embedding_that_renormalises_its_weight(compared):
    def step(s, k, tape):
        i = torch.tensor([k % 5, 1])
        with tape():
            s.w.grad = None
            y = F.embedding(i, s.w, max_norm=1.0).sum()
            y.backward()
            with torch.no_grad():
                s.w.add_(0.3)
        return y.detach()

    assert coexecuted(compared(weights("w", size=(5, 3)), step, 8), 5)


# --- NumPy and threads ---------------------------------------------------------------------------


def test_an_array_over_an_input_is_written_between_two_uses():
    def step(s, k, tape):
        array = np.ones(3, dtype=np.float32) * k
        x = torch.from_numpy(array)
        with tape():
            y = x * 2
            array += 1
            z = x * 3
        return y, z

    compare(nothing, step, 6)


def test_an_array_over_an_input_is_written_before_a_new_path():
    def step(s, k, tape):
        array = np.ones(3, dtype=np.float32) * k
        x = torch.from_numpy(array)
        with tape():
            y = x * 2
            array += 1
            if k == 5:
                y = y.exp()
        return y

    compare(nothing, step, 8)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("gradient", ["backward", "grad", "a custom function"])
def test_an_array_over_an_input_is_written_before_the_backward_pass(first, synchronous, gradient):
    """Autograd has saved the input, and reads what Python has written there."""

    def step(s, k, tape):
        array = np.random.randn(5, 4).astype(np.float32)
        x = torch.from_numpy(array)
        with tape():
            h = s.model(x)
            if gradient == "a custom function":
                h = Twice.apply(h)
            loss = h.square().mean()
            if k >= first:
                array[:] = k
            s.optimizer.zero_grad()
            if gradient == "grad":
                s.model.weight.grad, s.model.bias.grad = torch.autograd.grad(loss, s.model.parameters())
            else:
                loss.backward()
            s.optimizer.step()

    report = compare(linear, step, 12, synchronous=synchronous)

    assert "CX0114" in [c.id for c in report.causes]


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i1", "?", "c8", "c16"])
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x[:, 1:], lambda x: x[:1].expand(5, 3)])
def test_what_an_array_has_been_given_is_seen_to_the_bit(dtype, layout):
    array = np.zeros((5, 3)).astype(dtype)
    tensor = layout(torch.from_numpy(array))
    exposure = expose(tensor, tensor)

    assert not exposure.written
    array[0, 2] = -0.0 if np.issubdtype(dtype, np.inexact) else 1
    assert exposure.written


def test_nan_in_an_array_is_as_it_was():
    array = np.full((5, 3), np.nan, dtype=np.float32)
    tensor = torch.from_numpy(array)

    assert not expose(tensor, tensor).written


@pytest.mark.parametrize("runner", ["python first", "graph first"])
def test_an_array_over_a_captured_tensor_is_written_between_two_uses(use_runner, runner):
    use_runner(runner)

    def make():
        array = np.ones(3, dtype=np.float32)
        return SimpleNamespace(array=array, x=torch.from_numpy(array))

    def step(s, k, tape):
        with tape():
            y = s.x * 2
            s.array += 1
            z = s.x * 3
        return y, z

    compare(make, step, 6)


def test_an_array_over_an_input_is_written_after_the_block(compared):
    def step(s, k, tape):
        with tape():
            y = s.x * 2
            s.x.add_(1)
        s.array += 1
        return y

    def make():
        array = np.ones(3, dtype=np.float32)
        return SimpleNamespace(array=array, x=torch.from_numpy(array))

    compared(make, step, 8)


@pytest.mark.parametrize("runner", ["native", "python first", "graph first"])
def test_the_array_of_a_result_is_written(use_runner, runner):
    use_runner(runner)

    def step(s, k, tape):
        x = torch.randn(3)
        with tape():
            y = x * 2
            array = y.numpy()
            array[0] = k
            z = y * 3
        return y, z

    compare(nothing, step, 8)


def test_the_array_of_a_parameter_sees_its_update(compared):
    def step(s, k, tape):
        x = torch.randn(5, 4)
        with tape():
            array = s.model.weight.detach().numpy()
            train(s, s.model(x).pow(2).mean())
        return array.copy()

    compared(linear, step, 8)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("shared", ["an array", "another tensor"])
@pytest.mark.parametrize("result", ["the view", "an array of it"])
def test_a_result_on_the_memory_of_an_input_is_on_that_memory(shared, result, synchronous):
    def make():
        return SimpleNamespace(model=torch.nn.Linear(3, 3), many=torch.randn(12, 4, 3), out=None, base=None)

    def step(s, k, tape):
        x = s.base = torch.from_numpy(s.many[k].numpy().copy()) if shared == "an array" else s.many[k]
        with tape():
            loss = (x + s.model(x)).square().mean()
            s.model.zero_grad()
            loss.backward()
            view = x[1:].detach()
            out = view if result == "the view" else view.numpy()
        s.out = out
        out[0] = k  # shows in the input
        return loss

    compare(make, step, 12, synchronous=synchronous)


# --- results that are a view of something outside on some paths only ---------------------------------


def test_gradients_that_are_added_up_now_and_then():
    def step(s, k, tape):
        with tape():
            if k % 4 != 3:
                s.optimizer.zero_grad()
            s.model(torch.randn(5, 4)).square().mean().backward()
            s.optimizer.step()

    compare(linear, step, 20)


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_sometimes_assigned(to_none):
    def step(s, k, tape):
        with tape():
            if s.w.grad is not None:
                s.w.grad = None if to_none else s.w.grad.zero_()
            (s.w * torch.randn(4)).sum().backward()
            if k % 3 == 2:
                s.w.grad = torch.ones(4) * 3
            torch.optim.sgd.sgd(
                [s.w.detach()],
                [s.w.grad],
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    compare(weights("w", size=4), step, 20)


def test_momentum_buffers_that_are_sometimes_made_anew():
    def step(s, k, tape):
        with tape():
            if k % 3 == 2:
                s.optimizer.state.clear()
            s.optimizer.zero_grad()
            s.model(torch.randn(5, 4)).square().mean().backward()
            s.optimizer.step()
            if k % 2:
                s.optimizer.step()

    compare(linear, step, 24)


CHANGES = {
    "t_": lambda s: s.b.t_(),
    "data": lambda s: setattr(s.b, "data", s.b.data.t()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_whose_strides_change_between_iterations_has_the_new_ones(name):
    def make():
        return SimpleNamespace(b=torch.zeros(4, 4), log=[])

    def step(s, k, tape):
        if k == 6:
            CHANGES[name](s)
        x = torch.arange(16.0).view(4, 4) * k
        with tape():
            s.b += x
            copy = s.b.clone()
            flat = s.b.as_strided((4,), (1,)) * 1
            s.b *= 0.5
        s.log.append((copy, flat))

    compare(make, step, 12)


def test_a_model_may_become_channels_last_in_the_middle():
    def make():
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        return SimpleNamespace(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), log=[]
        )

    def step(s, k, tape):
        if k == 6:
            s.model.to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 6, 6)
        with tape():
            train(s, s.model(x).relu().mean())
            s.log.append(s.model[0].weight.detach().clone())

    compare(make, step, 14)
