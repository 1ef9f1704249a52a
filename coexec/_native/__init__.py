"""The native part of coexec, when it is built: GraphRunner, channels, executed locations.

`core` is the extension module, or None where no C++ compiler was found when coexec was installed.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

core: Any = None
if os.environ.get("COEXEC_NATIVE", "1") != "0":
    try:
        core = importlib.import_module("coexec._native._core")
    except ImportError:
        core = None


if core is not None:

    def _empty(geometry: Any, scalar_type: Any, device: Any) -> torch.Tensor:
        dim, dtype = geometry[0], core.dtype(scalar_type)
        return torch.empty_strided(geometry[1 : 1 + dim], geometry[1 + dim :], dtype=dtype, device=device)

    def _feed(token: Any, after: Any, geometry: Any, scalar_type: Any, device: Any) -> Any:
        return torch.empty_like(token), _empty(geometry, scalar_type, device)

    def _fetch(token: Any, value: Any, slot: Any) -> Any:
        return torch.empty_like(token)

    def _bernoulli(token: Any, geometry: Any, scalar_type: Any, p: Any) -> Any:
        return torch.empty_like(token), _empty(geometry, scalar_type, "cpu")

    torch.library.register_fake("coexec::feed", _feed)
    torch.library.register_fake("coexec::feed_of_any_size", _feed)
    torch.library.register_fake("coexec::fetch", _fetch)
    torch.library.register_fake("coexec::bernoulli", _bernoulli)
    torch.library.register_fake("coexec::bernoulli_of_any_size", _bernoulli)
