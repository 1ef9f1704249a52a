"""The state around a call that changes what it computes, as one hashable value.

In:  PyTorch's thread-local and global settings.
Out: a tuple that is part of every event's key, and a context that puts it back for a replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from coexec._native import core
from coexec._private import kernel_choices, transform_depth

_AUTOCAST_DEVICES = ("cpu", "cuda")


_TINIEST = 5e-324  # what becomes of it under an operation is asked of the processor


def float_control() -> int:
    """How this thread rounds, and whether it flushes denormal numbers."""
    return int(_TINIEST * 1.0 == 0.0) if core is None else int(core.float_control())


def _set_float_control(control: int) -> None:
    if core is None:
        torch.set_flush_denormal(bool(control))
    else:
        core.set_float_control(control)


def ambient(own_modes: int = 0) -> Hashable:
    """Grad mode, autocast, default dtype, determinism, and whether anything transforms operations.

    Args:
        own_modes: dispatch modes that coexec itself has entered, which don't count.
    """
    autocast = (
        tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES])
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        else None
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        transform_depth(own_modes),
        kernel_choices(),
        float_control(),
    )


@contextlib.contextmanager
def restored(state: Hashable) -> Iterator[None]:
    """Runs a block under the grad mode, autocast state, default dtype and rounding of an earlier call."""
    made_by_ambient: Any = state
    grad, inference, autocast, dtype, *_, rounding = made_by_ambient
    with contextlib.ExitStack() as stack:
        if rounding != float_control():
            stack.callback(_set_float_control, float_control())
            _set_float_control(rounding)
        if inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(inference))
        if grad != torch.is_grad_enabled():
            stack.enter_context(torch.set_grad_enabled(grad))
        if dtype != torch.get_default_dtype():
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        now: Any = ambient()
        if autocast != now[2]:
            for device, enabled, dtype in autocast or [(d, False, None) for d in _AUTOCAST_DEVICES]:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield
