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

    def _feed(token: Any, after: Any, geometry: Any, scalar_type: Any, device: Any) -> Any:
        dim, dtype = geometry[0], core.dtype(scalar_type)
        size, stride = geometry[1 : 1 + dim], geometry[1 + dim :]
        return torch.empty_like(token), torch.empty_strided(size, stride, dtype=dtype, device=device)

    def _fetch(token: Any, value: Any, slot: Any) -> Any:
        return torch.empty_like(token)

    torch.library.register_fake("coexec::feed", _feed)
    torch.library.register_fake("coexec::feed_of_any_size", _feed)
    torch.library.register_fake("coexec::fetch", _fetch)
