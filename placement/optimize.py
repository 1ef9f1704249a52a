"""optimize: a model and example inputs -> the fastest placement that was found and measured.

    capture -> examples -> offers -> costs -> op-level -> merging -> graph-level -> final comparison -> Placed

Never worse: the result of the searches and every single backend are measured again in fresh rounds,
end to end and in turns, and the best of all is returned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from placement.capture import Captured, capture, capture_graph
from placement.errors import CaptureError, PlacementError
from placement.measuring.conditions import quiet, release_memory
from placement.measuring.log import CostLog, default_path
from placement.measuring.measurer import Measurer
from placement.measuring.protocol import Protocol
from placement.placed import Placed
from placement.registry import REGISTRY, Registry
from placement.search.costs import Progress
from placement.searching import Explored, Level, Search
from placement.values import record

Model = torch.nn.Module | ExportedProgram | GraphModule
Allocator = Literal["restore", "keep"]


@dataclass(frozen=True)
class Options:
    """What `optimize` can be told; see there."""

    backends: Sequence[str] | None = None
    budget_s: float = 300.0
    log: str | os.PathLike[str] | CostLog | None = "default"
    level: Level = "graph"
    fuel: int | None = None
    seed: int = 0
    allocator: Allocator = "restore"
    registry: Registry | None = None
    protocol: Protocol | None = None
    timeout_s: float = 60.0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise PlacementError(
                f"budget_s is {self.budget_s}; the search needs a positive number of seconds."
            )
        if not self.timeout_s > 0:
            raise PlacementError(f"timeout_s is {self.timeout_s}; it must be a positive number of seconds.")
        if self.level not in ("op", "graph"):
            raise PlacementError(f"level is {self.level!r}; it is 'op' or 'graph'.")
        if self.allocator not in ("restore", "keep"):
            raise PlacementError(f"allocator is {self.allocator!r}; it is 'restore' or 'keep'.")
        if self.fuel is not None and self.fuel < 0:
            raise PlacementError(f"fuel is {self.fuel}; it counts parts, from 0 on.")


def optimize(
    model: Model,
    example_inputs: Sequence[Any],
    *,
    backends: Sequence[str] | None = None,
    budget_s: float = 300.0,
    log: str | os.PathLike[str] | CostLog | None = "default",
    level: Level = "graph",
    fuel: int | None = None,
    seed: int = 0,
    allocator: Allocator = "restore",
    registry: Registry | None = None,
    protocol: Protocol | None = None,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> Placed:
    """Finds out which backend is fastest for each part of a model on this machine.

    Args:
        model: a module (call `eval()` on it first), an exported program, or a flat FX graph of ATen
            operations with `meta["val"]`.
        example_inputs: positional arguments. The result is for their shapes and dtypes.
        backends: names of the backends to consider; None: all that are installed and automatic. `aten` is
            always among them, for what nothing else runs.
        budget_s: seconds for the search, compilation included. What the log knows costs nothing.
        log: the cost log's path, or an open one; "default": `placement.measuring.log.default_path`;
            None: no log.
        level: "op": stop after the op-level search; "graph": go on with the graph-level search.
        fuel: how many parts may leave ATen, first ones first; None: all. To find out which part makes a
            model wrong or slow, halve it. With fuel, the placement is returned even if a single backend is
            faster.
        seed: of the graph-level search and the order of measurements.
        allocator: while measuring, the C library keeps freed memory, which avoids page faults; "keep" leaves
            it so for the process, "restore" puts glibc's defaults back.
        registry: backends with their patterns and rules; None: the process's.
        protocol: how much to measure.
        timeout_s: seconds after which a backend that is tried in a child process counts as hung.
        progress: is called with what is going on and how far it is.

    Raises:
        BackendError: if a backend is unknown or missing here.
        CaptureError: if the model cannot be captured as one graph.
        PatternError: if a rule of a backend raises.
        PlacementError: if an option makes no sense.
    """
    options = Options(
        backends, budget_s, log, level, fuel, seed, allocator, registry, protocol, timeout_s, progress
    )
    return explore(model, example_inputs, options).placed


def explore(model: Model, example_inputs: Sequence[Any], options: Options) -> Explored:
    """Does what `optimize` does, and keeps all that was compared in the end, for benchmarks."""
    if not isinstance(example_inputs, (list, tuple)):
        raise CaptureError(
            f"example_inputs must be a tuple of arguments, not a {type(example_inputs).__name__}. "
            "For one tensor: (x,)."
        )
    registry = options.registry or REGISTRY
    registry.load_entry_points()
    started = time.perf_counter()
    captured = _capture(model, tuple(example_inputs))
    if not len(captured.graph):
        raise CaptureError("the model has no operations to place; it only passes its inputs or constants on.")
    devices = {torch.device(spec.device).type for spec in captured.inputs}
    chosen = registry.choose(options.backends, devices)
    inputs = captured.fitted(captured.flatten(*example_inputs))
    log = options.log
    costs = log if isinstance(log, CostLog) else CostLog(default_path() if log == "default" else log)
    protocol = replace(options.protocol or Protocol(), seed=options.seed)
    examples = record(captured.graph, inputs)
    measurer = Measurer(captured.graph, examples, costs, protocol, options.timeout_s)
    restore = options.allocator == "restore"
    search = Search(
        captured,
        inputs,
        chosen,
        measurer,
        options.progress or (lambda what, done, total: None),
        # The last word is spoken under the conditions in which the result will run.
        before_final=(lambda: release_memory()) if restore else (lambda: True),
    )
    try:
        with quiet(allocator=True, restore=restore):
            return search.run(
                registry,
                options.budget_s,
                options.level,
                options.fuel,
                options.seed,
                time.perf_counter() - started,
            )
    finally:
        measurer.close()
        if costs is not log:
            costs.close()


def _capture(model: Any, examples: tuple[Any, ...]) -> Captured:
    if isinstance(model, GraphModule) and all("val" in n.meta for n in model.graph.nodes if n.op != "output"):
        return capture_graph(model)
    return capture(model, examples)
