"""What optimizers do to gradients, without a torch call for each of them.

In:  calls of `Optimizer.zero_grad`, and of the `_init_group` of PyTorch's own optimizers, in a co-executed
     block.
Out: what they do.

Both read the `.grad` of every parameter, several times, and each read goes through the function modes. That
was a third of the skeleton's time. What `_init_group` collects is the same for all parameters, and follows
from the options of the group: it is looked up in what one call of PyTorch's own function has collected, and
later calls are made in C++.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
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


#: Where an item of a list comes from: the parameter, its gradient, nowhere, or the state of that name.
_Source = int | str | None
_PARAMETER, _GRADIENT = 0, 1

#: What each list of an `_init_group` that returns False gets, by the function and what it decides by.
_known: dict[Hashable, list[_Source]] = {}


def init_group(runner: PythonRunner, call: MethodCall) -> Any:
    """`_init_group`: collects parameters, gradients and state.

    Gradients may be placeholders, which are only looked at.
    """
    optimizer = call.optimizer
    group, *lists = call.args or ({},)
    parameters = group.get("params") if isinstance(group, dict) else None
    if parameters.__class__ is not list or not _may_shorten(optimizer):
        return call.make()
    fresh = not call.kwargs and all(v.__class__ is list and not v for v in lists)
    sources = _known.get(_decides(call, group)) if fresh else None
    states = optimizer.state
    if sources and states.__class__ is defaultdict and runner.collect(parameters, states, sources, lists):
        return False
    shown = runner.show_gradients(parameters)
    if shown is not None:
        try:
            with torch._C.DisableTorchFunction():
                if _has_state(optimizer, parameters):
                    returned = call.make()
                    if fresh and returned is False and lists and lists[0]:
                        _learn(_decides(call, group), optimizer.state, parameters, lists)
                    return returned
        finally:
            core.announce_gradients(*shown)
    return call.make()


def _decides(call: MethodCall, group: dict[str, Any]) -> tuple[Hashable, ...]:
    """What an `_init_group` decides by: flags of the group, and whether and how numbers differ from 0."""
    checked = vars(call.optimizer).get("_need_device_dtype_check_for_fused")
    return (call.original, checked, *[(name, _kind(value)) for name, value in group.items()])


def _kind(value: Any) -> Hashable:
    if value is None or value.__class__ is bool:
        return value
    if value.__class__ in (int, float):
        return (value < 0, value > 0, value == 0)
    kind: type = value.__class__
    return kind


def _learn(
    decides: Hashable, states: Any, parameters: Sequence[torch.Tensor], lists: Sequence[list[Any]]
) -> None:
    """Finds where the items of each list come from; keeps it if that is one thing for all parameters."""
    used = [p for p in parameters if p.grad is not None]
    of: dict[_Source, list[Any]] = {_PARAMETER: used, _GRADIENT: [p.grad for p in used]}
    of |= {name: [states[p].get(name) for p in used] for name in states.get(used[0], ())}
    sources: list[_Source] = []
    for items in lists:
        found = [source for source, values in of.items() if list(map(id, values)) == list(map(id, items))]
        if items and len(found) != 1:
            return
        sources.append(found[0] if items else None)
    _known[decides] = sources


def _may_shorten(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody sees the calls that are left out: no mode of the user's, and no profiler."""
    named = hasattr(optimizer, "_zero_grad_profile_name")
    return named and is_inmost() and not is_profiled()


def _has_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether no state is made for these parameters: that computes tensors."""
    if isinstance(optimizer, torch.optim.SGD):
        return True
    return all(p.grad is None or optimizer.state.get(p) for p in parameters)
