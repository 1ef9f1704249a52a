"""The native part of coexec, when it is built: GraphRunner, channels, executed locations.

`core` is the extension module, or None where no C++ compiler was found when coexec was installed.
"""

from __future__ import annotations

import os
from typing import Any

import torch  # noqa: F401  # loads the libraries that the extension links to

core: Any = None
if os.environ.get("COEXEC_NATIVE", "1") != "0":
    try:
        from coexec._native import _core as core
    except ImportError:
        core = None
