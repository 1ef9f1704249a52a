"""Equality of observations up to rounding: what compiled blocks may differ in from eager."""

from __future__ import annotations

import re

import numpy as np
import torch

RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""The latter is what adaptive optimizers make of gradients that are nothing but rounding."""
_NUMBER = re.compile(r"-?\d+\.\d*(?:e[-+]?\d+)?")
_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def nearly(a, b):
    """Whether two observations of `tests.coexec.harness` are equal but for rounding."""
    if type(a) is not type(b):
        return False
    if isinstance(a, str):
        return _NUMBER.sub("#", a) == _NUMBER.sub("#", b) and _close(_numbers(a), _numbers(b))
    if isinstance(a, tuple) and a and a[0] == "float":
        return _close([float.fromhex(a[1])], [float.fromhex(b[1])])
    if isinstance(a, tuple) and a and a[0] == "array" and np.dtype(a[1]).kind == "f":
        return a[:3] == b[:3] and _close(*(np.frombuffer(x[3], x[1]) for x in (a, b)))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(nearly, a, b))
    if not isinstance(a, dict):
        return a == b
    if list(a) != list(b):
        return False
    if "bytes" in a and a["dtype"] in _FLOATING and a["dtype"] == b["dtype"]:
        values = [
            torch.frombuffer(bytearray(x["bytes"]), dtype=x["dtype"]).double() if x["bytes"] else []
            for x in (a, b)
        ]
        if len(values[0]) != len(values[1]) or not _close(*values):
            return False
        return all(nearly(a[k], b[k]) for k in a if k != "bytes")
    return all(nearly(a[k], b[k]) for k in a)


def _numbers(text):
    return [float(n) for n in _NUMBER.findall(text)]


def _close(a, b):
    return bool(np.allclose(a, b, RELATIVE, ABSOLUTE, equal_nan=True))
