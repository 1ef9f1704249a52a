"""What happened to each program: `coexec.explain()`.

In:  the states of all programs.
Out: an `Explanation` whose text a person reads and whose fields a program does.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

from coexec.location import describe, sites
from coexec.program_state import Phase, ProgramState
from coexec.programs import all_states
from coexec.runners.pending import settle_all
from coexec.tracegraph.cases import SwitchCase, assign_cases
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.loops import Loop, loops_around
from coexec.tracegraph.program import Call, Program, When
from coexec.tracegraph.text import format_cases, format_graph


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why an iteration, or the rest of them, did not run in the co-execution phase."""

    iteration: int
    id: str
    cause: str
    where: str


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the symbolic graph without control flow."""

    operations: int
    deferred: int
    executor: str


@dataclass(frozen=True)
class ProgramReport:
    """One program.

    Attributes:
        key: where its tape stands.
        phase: what its next iteration will do.
        steps: iterations by phase: `tracing`, `co-execution`, `dynamic`, `fallback`, `eager`.
        traces: traces collected.
        fallbacks: co-executed iterations that became eager ones.
        causes: every cause that kept an iteration from co-execution.
        eager_cause: why the program is left alone, if it is.
        dynamic_cause: why it is in the dynamic phase, if it is.
        sent: calls that the dynamic phase sent to the queue.
        waits: calls of the dynamic phase that Python ran itself, after waiting for the queue: name and
            reason of each, and how often, the most frequent first.
        graph: its TraceGraph.
        graph_text: the TraceGraph as text, loops rolled up.
        switch_cases: the switch-cases of the TraceGraph.
        blocks: the blocks of its program.
        compiling: how many blocks another process compiles, which will take their place.
        unsettled: iterations without a fallback after which its blocks are compiled, if they wait for that.
        compile_s: seconds that each making of a symbolic graph took.
        python_ms, python_stall_ms: the PythonRunner's time of the latest co-executed
            iterations, and its wait.
        graph_ms, graph_stall_ms: the GraphRunner's.
    """

    key: str
    phase: str
    steps: dict[str, int]
    traces: int
    fallbacks: int
    causes: tuple[Fallback, ...]
    eager_cause: str | None
    dynamic_cause: str | None
    sent: int
    waits: tuple[tuple[str, str, int], ...]
    graph: TraceGraph | None
    graph_text: str
    switch_cases: tuple[SwitchCase, ...]
    blocks: tuple[Block, ...]
    compiling: int
    unsettled: int
    compile_s: tuple[float, ...]
    python_ms: tuple[float, ...]
    python_stall_ms: tuple[float, ...]
    graph_ms: tuple[float, ...]
    graph_stall_ms: tuple[float, ...]

    @property
    def coexec_share(self) -> float:
        """Share of iterations that ran in the co-execution phase, between 0 and 1."""
        total = sum(self.steps.values())
        return self.steps.get("co-execution", 0) / total if total else 0.0

    def summary(self) -> str:
        """The report without the graph."""
        steps = ", ".join(f"{n} {phase}" for phase, n in self.steps.items()) or "none"
        lines = [
            f"program {self.key}: {self.phase} phase",
            f"  iterations: {steps}; {self.traces} traces, {self.fallbacks} fallbacks",
        ]
        counts = Counter((c.id, c.cause, c.where) for c in self.causes)
        for (id_, cause, where), n in counts.most_common(8):
            lines.append(f"  {n} x {id_} {cause} (from {where})")
        if len(counts) > 8:
            lines.append(f"  and {len(counts) - 8} other causes")
        if self.eager_cause:
            lines.append(f"  left to eager execution: {self.eager_cause}")
        if self.dynamic_cause:
            lines.append(f"  runs call by call: {self.dynamic_cause}")
        if self.sent:
            waited = sum(n for _, _, n in self.waits)
            lines.append(f"  dynamic phase: {self.sent} calls sent to the queue, {waited} run by Python")
            for name, reason, n in self.waits[:8]:
                lines.append(f"    {n} x {name}: {reason}")
        symbols = [] if self.graph is None else list(enumerate(self.graph.symbols))
        ranges = [f"s{i} from {s.low} to {s.high}" for i, s in symbols if s.low <= s.high]
        if ranges:
            lines.append(f"  sizes that vary: {', '.join(ranges)}")
        if self.blocks:
            sizes = ", ".join(
                f"{b.operations} operations by {b.executor}"
                + (f" ({b.deferred} at the commit)" if b.deferred else "")
                for b in self.blocks
            )
            soon = f"; {self.compiling} are being compiled" if self.compiling else ""
            if self.unsettled:
                soon = f"; compiled after {self.unsettled} more iterations without a fallback"
            lines.append(f"  blocks: {sizes}; made in {sum(self.compile_s):.2f} s{soon}")
        if self.python_ms:
            lines.append(
                f"  medians a step: PythonRunner {_median(self.python_ms)} ms and "
                f"{_median(self.python_stall_ms)} waiting, GraphRunner {_median(self.graph_ms)} ms and "
                f"{_median(self.graph_stall_ms)} waiting"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [self.summary()]
        if self.graph_text:
            parts += ["  TraceGraph:", _indented(self.graph_text)]
        if len(self.switch_cases) > 1:
            parts += ["  switch-cases:", _indented(format_cases(self.switch_cases))]
        return "\n".join(parts)


@dataclass(frozen=True)
class Explanation:
    """All programs, in the order in which they first ran."""

    programs: tuple[ProgramReport, ...]

    def summary(self) -> str:
        """The text without the graphs."""
        return "\n".join(p.summary() for p in self.programs) or "no tape has been used"

    def __str__(self) -> str:
        return "\n".join(map(str, self.programs)) or "no tape has been used"


_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def explain() -> Explanation:
    """What happened to each program: phases, traces, fallbacks and why, the graph, the times.

    Returns:
        An object that prints as text; its fields hold the same.
    """
    settle_all()
    return Explanation(tuple(report(state) for state in all_states()))


def report(state: ProgramState) -> ProgramReport:
    """The report of one program."""
    graph = state.graph
    program = state.skeleton.program if state.skeleton is not None else None
    return ProgramReport(
        key=state.key,
        phase=state.phase.value,
        steps=dict(state.steps),
        traces=state.collected,
        fallbacks=state.fallbacks,
        causes=tuple(
            Fallback(i, c.reason.id, f"{c.reason.title}: {c.detail}", c.where) for i, c in state.causes
        ),
        eager_cause=None if state.eager_cause is None else str(state.eager_cause),
        dynamic_cause=None if state.dynamic_cause is None else str(state.dynamic_cause),
        sent=state.sent,
        waits=tuple((name, reason, n) for (name, reason), n in state.waits.most_common()),
        graph=graph,
        graph_text="" if graph is None else format_graph(graph, describe, graph_loops(graph, state)),
        switch_cases=() if graph is None else assign_cases(graph.edges),
        blocks=() if program is None or state.phase is not Phase.COEXECUTION else _blocks(program),
        compiling=state.compiling,
        unsettled=state.unsettled,
        compile_s=tuple(state.compile_s),
        python_ms=tuple(state.python_ms),
        python_stall_ms=tuple(state.python_stall_ms),
        graph_ms=tuple(state.graph_ms),
        graph_stall_ms=tuple(state.graph_stall_ms),
    )


def graph_loops(graph: TraceGraph, state: ProgramState) -> dict[int, tuple[Loop, ...]]:
    """The loops around each node of a program's graph."""
    return {n.id: loops_around(reversed(_of_others(sites(n.location))), state.entry) for n in graph.nodes}


def _of_others(found: list[tuple[CodeType, int]]) -> list[tuple[CodeType, int]]:
    """Call sites without those in coexec's own code."""
    return [site for site in found if not site[0].co_filename.startswith(_OWN_FOLDER)]


def _blocks(program: Program) -> tuple[Block, ...]:
    if program.compiled:
        return tuple(Block(b.operations, b.deferred, b.executor) for b in program.compiled)
    blocks = []
    for first, end in program.blocks:
        calls = [i for i in program.instructions[first:end] if isinstance(i, Call)]
        if calls:
            blocks.append(Block(len(calls), sum(c.when is not When.NOW for c in calls), "aten"))
    return tuple(blocks)


def _median(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):.2f}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
