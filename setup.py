"""Builds the native GraphRunner, which is optional; all else about the project is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Command, Extension, setup

NATIVE = Path("coexec/_native")


def native_extension() -> tuple[list[Extension], dict[str, type[Command]]]:
    """Return the extension modules and build commands; both are empty when there is nothing to build with."""
    sources = sorted(str(path) for path in NATIVE.glob("*.cpp"))
    if not sources:
        return [], {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        report_missing(f"torch is not installed here ({error})")
        return [], {}

    class BuildOptionalExtension(BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:
                # An older library would run beside newer Python code.
                for extension in self.extensions:
                    Path(self.get_ext_filename(self.get_ext_fullname(extension.name))).unlink(missing_ok=True)
                lines = str(error).strip().splitlines() or [type(error).__name__]
                report_missing(lines[0])

    extension = CppExtension(
        "coexec._native._core", sources, extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden"]
    )
    extension.depends = sorted(str(path) for path in NATIVE.glob("*.h"))
    # setuptools then goes on without the library.
    extension.optional = True
    return [extension], {"build_ext": BuildOptionalExtension}


def report_missing(reason: str) -> None:
    """Say in one line what is not built and what is used instead."""
    print(
        f"coexec: the native GraphRunner could not be built ({reason});"
        " the Python runner and the aten executor will be used.",
        file=sys.stderr,
    )


extensions, commands = native_extension()
setup(ext_modules=extensions, cmdclass=commands)
