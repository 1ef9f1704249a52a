"""Optional packages: whether they are there and work, found out without importing more than needed."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from importlib import metadata

EXTRAS = {
    "onnxruntime": "onnxruntime",
    "onnx": "onnxruntime",
    "onnxscript": "onnxruntime",
    "openvino": "openvino",
    "tvm": "tvm",
    "torch_tensorrt": "tensorrt",
    "deap": "placement",
}
"""The extra of coexec that brings a package."""


@cache
def missing_packages(*names: str) -> str | None:
    """Which packages are missing or broken, and what to do; None if all can be imported."""
    for name in names:
        extra = EXTRAS.get(name, name)
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install 'coexec[{extra}]')"
        try:
            importlib.import_module(name)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return f"{name} is installed but cannot be imported: {type(error).__name__}: {lines[0]}"
    return None


def version_of(distribution: str) -> str:
    """The version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
