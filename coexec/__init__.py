"""coexec runs a PyTorch program as it is, and the compiled graph of its iterations beside it.

    for x, y in loader:
        with coexec.GradientTape():
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    print(coexec.explain())

Packages, in the direction of the data: `tracer` records an iteration as a `Trace`; `tracegraph`
merges traces into a `TraceGraph` and lowers it to a `Program`; `executors` compile its blocks;
`runners` run Python's skeleton and the program beside each other. Start at
`tracegraph.graph.TraceGraph`; `tape` shows how everything meets.
"""

from coexec.draw import draw
from coexec.errors import CoexecError, CommitError, OptionError, TapeError, VerificationError
from coexec.explain import Explanation, ProgramReport, explain
from coexec.options import Options, options
from coexec.programs import reset
from coexec.tape import GradientTape

__version__ = "0.1.0"

__all__ = [
    "CoexecError",
    "CommitError",
    "Explanation",
    "GradientTape",
    "OptionError",
    "Options",
    "ProgramReport",
    "TapeError",
    "VerificationError",
    "draw",
    "explain",
    "options",
    "reset",
]
