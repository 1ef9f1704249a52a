"""A backend as somebody else would write it: its own file, nothing of placement but the public names.

`Negation` knows that relu(x) + relu(-x) is |x|, and is fast at it. What else it can be told to do shows
what becomes of backends that are wrong, crash or hang.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import placement
from placement import is_op, wildcard


class Negation(placement.Backend):
    """Sums of a rectified value and its rectified negation."""

    name = "third-party"

    def patterns(self):
        x = wildcard()
        return [is_op("add")(is_op("relu")(x), is_op("relu")(is_op("neg")(x)))]

    def lower(self, segment):
        return None

    def compile(self, lowered, segment):
        fault = os.environ.get("THIRD_PARTY_FAULT", "")

        def run(x):
            if fault == "crash":
                ctypes.string_at(0)
            if fault == "exit":
                os._exit(3)
            if fault == "hang":
                time.sleep(600)
            if fault == "wrong":
                return (x.abs() * 1.01,)
            return (x.abs(),)

        return run

    def version_key(self):
        return "1.0"


def write_distribution(folder: Path, entry: str = "tests_placement_third_party:Negation") -> None:
    """Makes an installed distribution of this file in a folder of the module path."""
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[coexec.backends]\nthird-party = {entry}\n")
    (folder / "tests_placement_third_party.py").write_text(Path(__file__).read_text())
