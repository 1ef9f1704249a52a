"""The context-switch cost: what entering and leaving a backend costs on top of a segment's own cost.

A segment's cost is measured by calling its function alone. In a placement it is called from generated
code that holds its tensors, between other parts. The difference is measured once per backend: generated
code that calls the backend's cheapest segment several times, against that segment alone (epsilon in
Collage's equation 2.2).
"""

from __future__ import annotations

from placement.backends.base import Backend
from placement.executable import repeated
from placement.measuring.measurer import Measurer
from placement.measuring.protocol import Measurement, measure
from placement.registry import REFERENCE
from placement.search.costs import Costs

LENGTH = 8
"""Calls in the generated code."""
LONGEST_S = 0.005
"""What a segment may cost for a switch, which takes microseconds, to be seen beside it."""


def switch_cost(backend: Backend, costs: Costs, measurer: Measurer) -> float:
    """Seconds for each part on a backend; 0 where it is too little to be seen beside what the parts cost."""
    if backend.name == REFERENCE:
        return 0.0
    stated = backend.overhead()
    if stated is not None:
        return stated
    usable = [(m.cost_s, mask) for (name, mask), m in costs.of.items() if name == backend.name and m.ok]
    if not usable:
        return 0.0
    cost_s, mask = min(usable)
    if cost_s > LONGEST_S:
        return 0.0
    key = measurer.context_key(backend, "context-switch")
    known = measurer.costs.get(key)
    if known is None:
        known = _measure(backend, mask, measurer)
        measurer.costs.put(key, known, "context switch")
    return known.cost_s


def _measure(backend: Backend, mask: int, measurer: Measurer) -> Measurement:
    segment = measurer.segment(mask)
    run = measurer.run(backend, mask)
    inputs = measurer.examples.inputs(segment)
    code = repeated(segment, run, LENGTH)
    whole, alone = measure([lambda: code(*inputs), lambda: run(*inputs)], measurer.protocol)
    extra = max(0.0, whole.cost_s / LENGTH - alone.cost_s)
    return Measurement("ok", extra, extra, extra, whole.samples, whole.load)
