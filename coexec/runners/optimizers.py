"""What optimizers do to gradients, without a torch call for each of them.

In:  calls of `Optimizer.zero_grad`, and of the `_init_group` of PyTorch's own optimizers, in a co-executed
     block.
Out: what they do.

Both read the `.grad` of every parameter, several times, and each read goes through the function modes. That
was a third of the skeleton's time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from coexec._native import core
from coexec._private import is_inmost, is_profiled
from coexec.block_watch import MethodCall

if TYPE_CHECKING:
    from coexec.runners.python_runner import PythonRunner


def zero_grad(runner: PythonRunner, call: MethodCall) -> Any:
    """`Optimizer.zero_grad`: parameters forget their gradients all at once."""
    asked = (*call.args, *call.kwargs.values())
    plain = asked in ((), (True,)) and call.kwargs.keys() <= {"set_to_none"}
    parameters = [p for group in call.optimizer.param_groups for p in group["params"]]
    if plain and _may_shorten(call.optimizer) and runner.forget_gradients(parameters):
        return None
    return call.make()


def init_group(runner: PythonRunner, call: MethodCall) -> Any:
    """`_init_group`: collects parameters, gradients and state, while each parameter has its gradient.

    That may be a placeholder, which is only looked at.
    """
    optimizer = call.optimizer
    parameters = call.args[0]["params"] if call.args else None
    if parameters.__class__ is list and _may_shorten(optimizer) and _has_state(optimizer, parameters):
        shown = runner.show_gradients(parameters)
        if shown is not None:
            try:
                with torch._C.DisableTorchFunction():
                    return call.make()
            finally:
                core.announce_gradients(*shown)
    return call.make()


def _may_shorten(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody sees the calls that are left out: no mode of the user's, and no profiler."""
    named = hasattr(optimizer, "_zero_grad_profile_name")
    return named and is_inmost() and not is_profiled()


def _has_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether no state is made for these parameters: that computes tensors."""
    if isinstance(optimizer, torch.optim.SGD):
        return True
    with torch._C.DisableTorchFunction():
        return all(map(optimizer.state.get, parameters))
