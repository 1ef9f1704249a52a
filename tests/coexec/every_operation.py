"""Compares operations with eager, one by one: `python -m tests.coexec.every_operation FIRST END STEP`.

The operations and their arguments are those of PyTorch's own tests (`op_db`). Each is called in a block of
five iterations: alone, with its gradients, and with the gradients of these. All have to have eager's bits.
What differs from itself in eager execution is left out. Prints a line for each difference, and at last how
many calls were compared.

In a process of its own: to import PyTorch's tests changes settings for good.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from contextlib import nullcontext
from itertools import islice

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import coexec

ITERATIONS = 5
SAMPLES = 4
#: Their results are memory that nobody has written.
UNDEFINED = ("empty", "new_empty", "as_strided_scatter")


def bits(value):
    """What can be compared with `==`, down to the bits; of memory without values what is known of it."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            return ("another layout", str(value.layout))
        plain = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        if value.device.type == "cpu":
            plain.copy_(value.detach())
        data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return (tuple(plain.shape), str(plain.dtype), value.requires_grad, tuple(value.stride()), data)
    if isinstance(value, (list, tuple)):
        return tuple(map(bits, value))
    return repr(value)


def copied(value):
    """A leaf of its own for each tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def real_sum(tensor):
    """A real number to differentiate."""
    return (tensor.abs() if tensor.is_complex() else tensor).sum()


def call(op, sample, order, tape):
    """The bits of what an operation returns, and of gradients up to an order; or how it fails."""
    torch.manual_seed(0)
    given, args, kwargs = tree_map(copied, (sample.input, sample.args, sample.kwargs))
    try:
        with tape():
            returned = op(given, *args, **kwargs)
            found = [returned, *gradients(returned, (given, args, kwargs), order)]
            found = tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, found)
    except Exception as error:
        return (type(error).__name__, str(error)[:60])
    return bits(found)


def again_elsewhere(op, sample, order):
    """The bits in eager execution, of calls with the memory in other places: LAPACK's may depend on these."""
    kept = []
    for number in range(40):
        kept.append(torch.empty(4 * number + 1))
        yield call(op, sample, order, nullcontext)


def gradients(returned, arguments, order):
    """The gradients of what was returned, and those of their squares."""
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
    roots = [t for t in tree_leaves(returned) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not order or not roots or not leaves:
        return []
    sums = [real_sum(t) for t in roots]
    first = torch.autograd.grad(sums, leaves, create_graph=order == 2, allow_unused=True)
    found = [[None if g is None else g.detach() for g in first]]
    again = [real_sum(g * g) for g in first if g is not None and g.requires_grad]
    if again:
        found.append(torch.autograd.grad(again, leaves, allow_unused=True))
    return found


def samples_of(op):
    """Some arguments that PyTorch's tests call the operation with."""
    types = sorted(op.supported_dtypes("cpu"), key=str)
    if not types:
        return []
    dtype = torch.float32 if torch.float32 in types else types[0]
    try:
        return list(islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), SAMPLES))
    except Exception:
        return []


def compare(op):
    """Yields a line for each call that differs, and None for each that does not."""
    orders = [0, *([1] if op.supports_autograd else []), *([2] if op.supports_gradgrad else [])]
    for number, sample in enumerate(samples_of(op)):
        for order in orders:
            eager, *others = (call(op, sample, order, nullcontext) for _ in range(3))
            if any(other != eager for other in others):
                continue
            key = (op.full_name, number, order)
            ours = [
                call(op, sample, order, lambda key=key: coexec.GradientTape(key=key))
                for _ in range(ITERATIONS)
            ]
            wrong = [i for i, found in enumerate(ours) if found != eager]
            if wrong and any(found != eager for found in again_elsewhere(op, sample, order)):
                continue
            where = f"{op.full_name}: sample {number}, gradients of order {order}, iterations {wrong}"
            yield f"{where}\n{coexec.explain().summary()}" if wrong else None
            coexec.reset()


def main():
    """Compare some operations; the exit status says whether all were eager's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("first", "end", "step"):
        parser.add_argument(name, type=int, help="of the positions in the list of operations")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("coexec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    compared = wrong = 0
    for op in op_db[chosen.first : chosen.end : chosen.step]:
        if op.name.startswith(UNDEFINED):
            continue
        for line in compare(op):
            compared += 1
            if line is not None:
                wrong += 1
                print(line, flush=True)
    print(f"{compared} calls compared, {wrong} differ")
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    raise SystemExit(main())
