"""List the backends, which of them can be used here, and why others can't."""

from __future__ import annotations

import argparse

from placement.cli.tables import table
from placement.registry import REGISTRY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> int:
    """Print a line a backend."""
    REGISTRY.load_entry_points()
    rows: list[tuple[str, ...]] = []
    for backend in REGISTRY:
        try:
            why = backend.missing()
        except Exception as error:
            why = f"broken: {type(error).__name__}: {error}"
        count = f"{len(REGISTRY.patterns(backend.name))} + {len(REGISTRY.rules(backend.name))}"
        status = why or f"usable, {backend.version_key()}"
        if not why and not backend.automatic:
            status += ", only when named"
        rows.append((backend.name, backend.level, ", ".join(backend.devices), count, status))
    rows += [(name, "", "", "", f"broken: {why}") for name, why in REGISTRY.broken.items()]
    print(table(("backend", "level", "devices", "patterns + rules", "status"), rows))
    return 0
