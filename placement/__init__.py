"""placement: every subgraph on the backend that is fastest for it, measured on this machine.

    placed = placement.optimize(model.eval(), (x,))
    y = placed(x)
    print(placed.report())

No backend is best for all operators, shapes and machines. Backends say what they can run, by patterns
and rules; what really is fastest is measured; and the mix runs without copies between the parts. After
Collage (Jeon et al., PACT 2022).

    graph        OpGraph: the operations of a model, what the rest speaks in
    patterns     what a backend can run: pattern language, rules, generator, registry
    backends     one adapter a backend
    measuring    what a segment costs: protocol, verification, cost log
    search       op-level dynamic programme, graph-level evolutionary search
    optimize     all of it, one after the other

`python -m placement --help` has it as commands. Start at `graph.OpGraph`.
"""

from placement.api import add_backend_pattern, add_backend_pattern_rule, register_backend
from placement.backends.base import Backend
from placement.errors import PlacementError, Unsupported
from placement.optimize import optimize
from placement.patterns.language import constant, dominates, is_op, outputs, wildcard
from placement.patterns.rules import PatternRule, Site, check_path
from placement.placed import Placed
from placement.report import Report
from placement.saving import load
from placement.segments import Segment

__all__ = [
    "Backend",
    "PatternRule",
    "Placed",
    "PlacementError",
    "Report",
    "Segment",
    "Site",
    "Unsupported",
    "add_backend_pattern",
    "add_backend_pattern_rule",
    "check_path",
    "constant",
    "dominates",
    "is_op",
    "load",
    "optimize",
    "outputs",
    "register_backend",
    "wildcard",
]
