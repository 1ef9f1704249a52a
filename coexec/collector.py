"""Puts Python's garbage collector off while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Has the garbage collector wait until the end of the context, if it is enabled.

    It looks at all objects whenever their number has grown by a quarter, and finds nothing among those of a
    graph that is being made.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
