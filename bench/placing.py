"""What `bench placement` measures: one workload in all modes, interleaved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

from bench.records import Result, resident_mb
from bench.workloads import Workload
from bench.workloads.base import Size
from placement.backends.base import relative_error
from placement.measuring.protocol import Protocol, compare
from placement.optimize import Options, explore
from placement.registry import REGISTRY
from placement.report import Report
from placement.searching import Explored

log = logging.getLogger(__name__)
Call = Callable[[], Any]

FROM_LOG_S = 1e-3
"""A budget in which nothing can be measured, so that a search has what the log has."""
COMPILE_MODES: dict[str, dict[str, Any]] = {
    "compile:default": {},
    "compile:max-autotune": {
        "max_autotune": True,
        "triton.cudagraphs": True,
        "coordinate_descent_tuning": True,
    },
    "compile:frozen": {"freezing": True},
}
"""What TorchInductor's configuration holds in each mode.

As options of torch.compile alone they would come too late for freezing: TorchDynamo asks for it when it
makes weights inputs or constants of the graph."""
ABLATION_BUDGET_S = 60.0
"""Of a search of the ablation at most, which has the costs of the whole search in its log."""
ABLATION = ("aten-channels-last", "aten-prepacked", "onednn-graph", "inductor", "openvino", "onnxruntime")
"""The order in which the ablation adds backends to ATen."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with each workload."""

    size: Size
    budget_s: float
    seed: int
    log: str
    protocol: Protocol
    backends: Sequence[str] | None = None
    compile_modes: Sequence[str] = tuple(COMPILE_MODES)
    ablation: bool = False


@dataclass
class Contest:
    """The modes of one workload: functions, and what is recorded of each beside its times."""

    calls: dict[str, Call] = field(default_factory=dict)
    first_call_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    """Modes that are another mode under a second name, and are not measured again."""

    def add(self, mode: str, call: Call, **details: Any) -> None:
        """Adds a mode after its first call; what raises is recorded as its error."""
        started = time.perf_counter()
        try:
            call()
        except Exception as error:
            log.warning("%s fails", mode, exc_info=error)
            self.errors[mode] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return
        self.first_call_s[mode] = time.perf_counter() - started
        self.calls[mode] = call
        self.details[mode] = details


def measure_workload(workload: Workload, batch: int, plan: Plan, tell: Callable[[str], None]) -> list[Result]:
    """One workload and batch size in all modes, in one process, in turns."""
    model, inputs = workload.make(plan.size, batch, plan.seed)
    contest = Contest()
    contest.add("eager", lambda: model(*inputs))
    torch._dynamo.reset()  # another batch size would be compiled for any
    for mode in plan.compile_modes:
        tell(f"{workload.name} {batch}: {mode}")
        add_compiled(contest, model, inputs, mode)
    options = Options(
        backends=plan.backends,
        budget_s=plan.budget_s,
        log=plan.log,
        seed=plan.seed,
        protocol=plan.protocol,
        allocator="keep",
        progress=lambda what, done, total: tell(f"{workload.name} {batch}: {what} {done}/{total}"),
    )
    explored = explore(model, inputs, options)
    with_log = explore(model, inputs, replace(options, level="op", budget_s=FROM_LOG_S))
    _add_placements(contest, explored, inputs, with_log.placed.report())
    if plan.ablation:
        _add_ablation(contest, model, inputs, options)
    tell(f"{workload.name} {batch}: measuring {len(contest.calls)} modes")
    with torch.no_grad():
        samples = compare(list(contest.calls.values()), plan.protocol)
    return _results(f"{workload.name}", batch, contest, samples, plan)


def add_compiled(contest: Contest, model: nn.Module, inputs: Sequence[torch.Tensor], mode: str) -> None:
    """Adds a model compiled by torch.compile."""
    # TorchDynamo tells compilations of one model apart by their options.
    compiled = torch.compile(model, options=COMPILE_MODES[mode])
    with inductor_config.patch(COMPILE_MODES[mode]):
        contest.add(mode, _bind(compiled, inputs))


def _add_placements(
    contest: Contest, explored: Explored, inputs: Sequence[torch.Tensor], with_log: Report
) -> None:
    report = explored.placed.report()
    names = {"op-level": "placement:op", "graph-level": None}
    modes = {name: names.get(name, name.replace("single ", "single:")) for name in explored.contenders}
    for name, mode in modes.items():
        if mode is not None:
            contest.add(mode, _bind(explored.contenders[name], inputs))
    chosen = modes[report.chosen]
    if chosen is None:
        contest.add("placement:two-level", _bind(explored.placed.function, inputs))
    else:
        contest.same["placement:two-level"] = chosen
    contest.details["placement:op"].update(
        predicted_ms=report.predicted_s * 1e3,
        search_cold_s=report.times.op_level_s,
        search_with_log_s=with_log.times.op_level_s,
    )
    contest.details.setdefault("placement:two-level", {}).update(
        report=report.to_json(),
        chosen=report.chosen,
        parts=[(row.backend, row.title) for row in report.rows],
        backends=sorted({row.backend for row in report.rows}),
        search_graph_level_s=report.times.graph_level_s,
    )


def _add_ablation(
    contest: Contest, model: nn.Module, inputs: Sequence[torch.Tensor], options: Options
) -> None:
    """Placements with more and more backends; their costs are in the log by now."""
    options = replace(options, level="op", budget_s=min(options.budget_s, ABLATION_BUDGET_S))
    usable = [name for name in ABLATION if name in REGISTRY and not REGISTRY.get(name).missing()]
    for count in range(1, len(usable) + 1):
        chosen = explore(model, inputs, replace(options, backends=usable[:count])).placed
        contest.add(f"ablation:+{usable[count - 1]}", _bind(chosen.function, inputs), added=usable[:count])


def _bind(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Call:
    return lambda: function(*inputs)


def _results(name: str, batch: int, contest: Contest, samples: list[list[float]], plan: Plan) -> list[Result]:
    with torch.no_grad():
        expected = _tensors(contest.calls["eager"]())
        errors = {mode: _error(_tensors(call()), expected) for mode, call in contest.calls.items()}
    common = {"batch": batch, "size": plan.size, "clock": plan.protocol.clock, "seed": plan.seed}
    results = []
    for mode, taken in zip(contest.calls, samples, strict=True):
        results.append(
            Result(
                name,
                mode,
                step_ms=tuple(1e3 * s for s in taken),
                first_call_s=contest.first_call_s[mode],
                equal=errors[mode] <= 1e-4,
                peak_rss_mb=resident_mb(),
                details={**common, "relative_error": errors[mode], **contest.details[mode]},
            )
        )
    by_mode = {result.mode: result for result in results}
    for mode, other in contest.same.items():
        known = by_mode[other]
        results.append(replace(known, mode=mode, details={**known.details, **contest.details[mode]}))
    failed = [Result(name, mode, error=error, details=common) for mode, error in contest.errors.items()]
    return [*results, *failed]


def _tensors(output: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor)]


def _error(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(outputs, expected, strict=True))
