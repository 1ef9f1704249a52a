"""A placed model in a file: the exported program as PyTorch saves it, and the placement beside it as JSON.

Compiled parts are not saved: they belong to this machine and these versions. Loading compiles them
again and verifies each against ATen.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from placement.capture import capture
from placement.errors import PlacementError
from placement.measuring.log import CostLog
from placement.measuring.measurer import Measurer
from placement.measuring.protocol import Protocol
from placement.placed import Placed
from placement.placements import Placement
from placement.registry import REGISTRY, Registry
from placement.searching import Search
from placement.values import record

FORMAT = 1


def save(placed: Placed, path: Path) -> None:
    """Writes a placed model.

    Raises:
        PlacementError: if it was made from a compiler's graph, which has no exported program.
    """
    program = placed.captured.program
    if program is None:
        raise PlacementError("only what was made from a module or an exported program can be saved.")
    description = {
        "format": FORMAT,
        "names": placed.captured.names,
        "placement": placed.placement.to_json(),
        "time": time.time(),
    }
    torch.export.save(program, path, extra_files={"placement": json.dumps(description)})


def load(path: str | Path, *, registry: Registry | None = None) -> Placed:
    """Reads a placed model and compiles its parts for this machine.

    Raises:
        PlacementError: if the file is no placed model, or a backend is missing or no longer agrees with ATen.
    """
    extra: dict[str, Any] = {"placement": ""}
    try:
        program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        raise PlacementError(f"{path} is no placed model: {error}") from error
    if not extra["placement"]:
        raise PlacementError(
            f"{path} is an exported program without a placement; pass it to optimize() first."
        )
    description = json.loads(extra["placement"])
    if description["format"] != FORMAT:
        raise PlacementError(f"{path} has format {description['format']}; this coexec reads {FORMAT}.")
    if program.example_inputs is None:
        raise PlacementError(f"{path} holds no example inputs, which loading needs to verify the parts.")
    examples = program.example_inputs[0]
    captured = capture(program, examples, names=tuple(description["names"]))
    placement = Placement.from_json(captured.graph, description["placement"])
    registry = registry or REGISTRY
    registry.load_entry_points()
    backends = registry.choose(placement.backends(), set())
    inputs = captured.flatten(*examples)
    measurer = Measurer(captured.graph, record(captured.graph, inputs), CostLog(None), Protocol())
    search = Search(captured, inputs, backends, measurer)
    try:
        with torch.no_grad():
            return Placed(captured, placement, search.function(placement), None)
    except RuntimeError as error:
        raise PlacementError(f"{path} cannot run here as it was placed: {error}") from error
    finally:
        measurer.close()
