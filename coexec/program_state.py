"""What is known of one program (one place of a `with GradientTape()`), and how it moves on.

In:  the trace of each traced iteration, the outcome of each co-executed one.
Out: the phase of the next iteration, and what it needs.

Phases: TRACING collects traces until one is covered by the TraceGraph; COEXECUTION runs the two
runners on it; DYNAMIC runs them on single calls, for programs whose iterations have no graph in common;
EAGER leaves the program alone. For the latter two `explain` shows the reason. From DYNAMIC an iteration
is traced now and then, less and less often, to see whether the TraceGraph covers it by now.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from types import CodeType

import torch

from coexec import collector
from coexec._native import core
from coexec.dynamic.table import Table
from coexec.executors import Made, compile_in_background, make_program
from coexec.executors.background import Compilation
from coexec.options import Options
from coexec.pace import Choice, Pace, processors
from coexec.reasons import Cause, cause
from coexec.runners.captures import Captures, Found
from coexec.runners.graph_runner import GraphRunner, make_graph_runner
from coexec.runners.native import NativeRunner
from coexec.runners.pending import Pending
from coexec.runners.skeleton import Skeleton, make_skeleton
from coexec.tracegraph.graph import TraceGraph
from coexec.tracegraph.growth import covered, differ, only_generalised, recombines
from coexec.tracegraph.in_pieces import forms_of_backward, in_pieces
from coexec.tracegraph.live import Way, live
from coexec.tracegraph.merge import Indistinct, MergeMemory, agree_on_hooks, merge
from coexec.tracegraph.program import Program
from coexec.tracegraph.symbolic import SharedShadow
from coexec.tracegraph.trace import Trace
from coexec.tracegraph.verify import verify_graph, verify_program, verify_trace
from coexec.tracer.identities import Identities
from coexec.updates import Updates

log = logging.getLogger(__name__)

#: Iterations in a row that cannot be traced before the program is left alone.
STRIKES = 3
#: Fallbacks among the latest `WINDOW` co-executed iterations before the dynamic phase.
MAX_FALLBACKS, WINDOW = 2, 6
#: Fallbacks before the dynamic phase when every co-executed iteration so far was one.
HOPELESS = 2
#: The same where there is no dynamic phase, and the program would be left alone.
MAX_FALLBACKS_ALONE, WINDOW_ALONE = 20, 40
#: Traces in a row that the TraceGraph did not cover before the dynamic phase.
PATIENCE = 5
#: Iterations of the dynamic phase before one is traced again: at first, and at most.
FIRST_RETRY, LAST_RETRY = 20, 1280
#: Seconds of the dynamic phase for each second that the latest merge took, before one is traced again.
RETRY_COST = 50
#: Co-executed iterations after which compiled graphs have their ways only, and how many these may be.
NARROW_AFTER, MAX_WAYS = 40, 8
#: Iterations that a graph serves before it is compiled, at most: one for each fallback but the first.
SETTLED_AFTER = 8
#: Forms of one backward pass before its pieces become events of their own, if these are not new each time.
MAX_FORMS = 2
#: Traces behind which sizes are symbols if whole traces differ in nothing else.
SIZES_KNOWN = 3
#: Fallbacks in a row that are no sign against a graph, if the traces add so little to it.
MAX_IN_ROW = 24
#: Whether they are from the first trace on: more can go wrong, and tests look for it.
ALWAYS_IN_PIECES = False
#: Lost captures before the dynamic phase.
MAX_LOST = 3
#: What is said when another way of running a program with a graph has become the fastest.
_NEWS = {
    Choice.USUAL: "the GraphRunner starts at once",
    Choice.LATE: "the GraphRunner starts when Python waits",
    Choice.EAGER: "iterations run eagerly, which is faster",
}


def _samples() -> deque[float]:
    return deque(maxlen=10_000)  # the latest iterations: a training run has millions


class Phase(enum.Enum):
    """What the next iteration of a program will do."""

    TRACING = "tracing"
    COEXECUTION = "co-execution"
    DYNAMIC = "dynamic"
    EAGER = "eager"


@dataclass
class ProgramState:
    """The life of one program."""

    key: str
    options: Options
    entry: tuple[CodeType, int]  # where the tape is entered
    phase: Phase = Phase.TRACING
    identities: Identities = field(default_factory=Identities)
    updates: Updates = field(default_factory=Updates)
    call_by_call: Pace = field(default_factory=Pace)  # or eagerly
    on_graph: Pace = field(default_factory=lambda: Pace((Choice.USUAL,)))  # in which way
    narrows: bool = False  # whether the next iteration may have a smaller graph
    settles: bool = False  # whether the graph has served long enough to be compiled
    traces: list[Trace] = field(default_factory=list)
    graph: TraceGraph | None = None
    skeleton: Skeleton | None = None
    steps: Counter[str] = field(default_factory=Counter)
    collected: int = 0
    causes: list[tuple[int, Cause]] = field(default_factory=list)
    eager_cause: Cause | None = None
    dynamic_cause: Cause | None = None
    sent: int = 0  # calls that the dynamic phase has sent to the queue
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # calls it waited at, and why
    in_pieces: bool = field(default_factory=lambda: ALWAYS_IN_PIECES)  # whether backward passes are
    strikes: int = 0
    uncovered: int = 0
    lost: int = 0
    recent: list[bool] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    graph_ms: deque[float] = field(default_factory=_samples)
    graph_stall_ms: deque[float] = field(default_factory=_samples)
    python_ms: deque[float] = field(default_factory=_samples)
    python_stall_ms: deque[float] = field(default_factory=_samples)
    running: bool = False
    pending: Pending | None = None  # an iteration that Python has left, and that is not finished
    _captures: Captures | None = None
    _compilation: Compilation | None = None
    _graph_runner: GraphRunner | None = None
    _second_graph_runner: GraphRunner | None = None
    _table: Table | None = None
    _merges: MergeMemory = field(default_factory=MergeMemory)
    _apart: int = 0
    _until_retry: int = 0
    _retry_after: int = field(default_factory=lambda: FIRST_RETRY)
    _ways: Counter[Way] = field(default_factory=Counter)  # of iterations since the graph is this one
    _recombines: bool = False  # whether the latest trace was made of what others had
    _in_row: int = 0  # fallbacks since an iteration was co-executed
    _entered: tuple[float, Choice] | None = None  # when the asynchronous iteration before began, and its way
    unsettled: int = 0  # iterations that the graph has to serve before it is compiled
    _narrowed: bool = False  # whether the skeleton has only these
    _returns: bool = False  # whether an iteration has then taken another one, or nothing is gained by it
    _compiles: bool = False  # whether a compiler has taken the graph
    _ran_eagerly: bool = False  # the latest iteration, or it was traced: malloc holds what that has freed
    _merge_s: float = 0.0
    _dynamic_s: float = 0.0

    @property
    def iteration(self) -> int:
        """How many iterations have been run, in any phase."""
        return sum(self.steps.values())

    @property
    def fallbacks(self) -> int:
        """How many co-executed iterations became eager ones."""
        return self.steps["fallback"]

    @property
    def graph_runner(self) -> GraphRunner:
        """The GraphRunner of this program; its thread starts with the first use."""
        if self._graph_runner is None:
            self._graph_runner = make_graph_runner()
        return self._graph_runner

    @property
    def idle_graph_runner(self) -> GraphRunner:
        """One that no unfinished iteration uses."""
        if self.pending is None or self.pending.graph_runner is not self._graph_runner:
            return self.graph_runner
        assert isinstance(self._graph_runner, NativeRunner)
        if self._second_graph_runner is None:
            self._second_graph_runner = NativeRunner(self._graph_runner)
        return self._second_graph_runner

    @property
    def table(self) -> Table:
        """The calls of the dynamic phase and their queue, whose thread starts with the first use."""
        if self._table is None:
            self._table = Table(core.Queue())
        return self._table

    # --- transitions ---

    def traced(self, trace: Trace | None, why: Cause | None, *, fell_back: bool = False) -> None:
        """Takes in an iteration of the tracing phase, or one that fell back from co-execution."""
        if trace is None:
            self._untraceable(why)
            return
        self.strikes = 0
        self.collected += 1
        if self.options.check:
            verify_trace(trace)
        self._ran_eagerly = True
        try:
            is_covered = self._merge(trace)
        except Indistinct:
            self.give_up(cause("CX0116", "the same calls do different things in two traces", self.key))
            return
        apart = len(self.updates.apart)
        anew = (
            apart != self._apart
        )  # updates are other events from here on, so that earlier traces cover less
        self._apart = apart
        converges = self.in_pieces and self._recombines
        self.uncovered = 0 if is_covered or anew else self.uncovered + (not converges)
        if is_covered:
            self._enter_coexecution()
        elif len(self.traces) >= self.options.max_traces and not fell_back:
            self.give_up(cause("CX0116", f"{len(self.traces)} traces", self.key))
        elif self.phase is Phase.DYNAMIC or self.uncovered >= PATIENCE:
            self._go_dynamic(cause("CX0116", f"{self.uncovered} in a row that were new", self.key))

    @collector.put_off()
    def _merge(self, trace: Trace) -> bool:
        """Merges a trace into the graph; returns whether the graph covered it already."""
        before = self.graph
        began = time.perf_counter()
        self.traces = [t for t in self.traces if agree_on_hooks(t, trace)]
        self.traces.append(in_pieces(trace) if self.in_pieces else trace)
        merged = merge(self.traces, self._merges)
        is_covered = covered(before, merged)
        if not is_covered and not self.in_pieces and self._comes_on_many_ways(merged):
            apart = [in_pieces(t) for t in self.traces]
            without, whole = (merge(traces, self._merges) for traces in (apart[:-1], apart))
            if recombines(without, whole, apart[-1]):
                log.info("%s: iteration %d: backward passes are taken to pieces", self.key, self.iteration)
                self.in_pieces, self.uncovered = True, 0
                self.traces, before, merged = apart, without, whole
                is_covered = covered(before, merged)
        self._recombines = before is not None and recombines(before, merged, self.traces[-1])
        self._merge_s, self._dynamic_s = time.perf_counter() - began, 0.0
        if self.options.check:
            verify_graph(merged)
        self._take_graph(merged)
        return is_covered

    def _comes_on_many_ways(self, graph: TraceGraph) -> bool:
        """Whether a backward pass does; where sizes are what differs, they may become symbols first."""
        latest = {tuple([(e.location, len(e.operations)) for e in t.events]) for t in self.traces[-2:]}
        with_sizes = len(self.traces) > SIZES_KNOWN or len(latest) > 1
        return forms_of_backward(graph, with_sizes=with_sizes) > MAX_FORMS

    def _take_graph(self, graph: TraceGraph | None) -> None:
        self.graph = graph
        self._ways.clear()
        self.narrows = self._narrowed = self.settles = False

    def fell_back(self, why: Cause, trace: Trace | None, why_untraceable: Cause | None) -> None:
        """Takes in a co-executed iteration that became an eager one."""
        self.note(why)
        self._remember(fell_back=True)
        forgiven = False
        if trace is None:
            self._untraceable(why_untraceable)
        elif len(self.traces) < self.options.max_traces:  # else the graph serves as it is, and learns no more
            self._move_to(Phase.TRACING)
            self.uncovered = 0
            before, narrowed = self.graph, self._narrowed and not self.compiling
            self._returns = self._returns or narrowed
            self.traced(trace, None, fell_back=True)
            learned = before is not None and self.graph is not None and only_generalised(before, self.graph)
            self._in_row += 1
            recurs = why.reason.id == "CX0005" and not differ(before, self.graph)
            composes = self._recombines and self._in_row <= MAX_IN_ROW and not recurs
            forgiven = learned or narrowed or composes
        if self.phase in (Phase.DYNAMIC, Phase.EAGER):
            return
        self.recent[-1] = not forgiven
        never = core is not None and len(self.recent) == HOPELESS and all(self.recent)
        if never or sum(self.recent) > (MAX_FALLBACKS_ALONE if core is None else MAX_FALLBACKS):
            which = f"{sum(self.recent)} of the latest {len(self.recent)} iterations"
            self._go_dynamic(cause("CX0117", which, why.where))
        elif self.phase is Phase.TRACING:
            self.unsettled = min(self.fallbacks - 1, SETTLED_AFTER) if self._may_compile else 0
            self._enter_coexecution()

    @property
    def _may_compile(self) -> bool:
        return self.options.executor == "inductor" and core is not None

    @property
    def looks_for_ways(self) -> bool:
        """Whether the ways of iterations matter: forks are where compiled blocks end."""
        return (
            self._may_compile
            and not self._returns
            and len(self._ways) <= MAX_WAYS
            and self._ways.total() < NARROW_AFTER
        )

    def coexecuted(self, way: Way | None) -> None:
        """Takes in a co-executed iteration that was committed, and how it went if that matters."""
        self._remember(fell_back=False)
        self.strikes = self._in_row = 0
        if way is not None:
            self._ways[way] += 1
            self.narrows = self._ways.total() == NARROW_AFTER and len(self._ways) <= MAX_WAYS
        if self.unsettled:
            self.unsettled -= 1
            self.settles = not self.unsettled

    def settle(self) -> None:
        """If it is time, has the blocks of the graph compiled.

        Each fallback makes another graph. One that may not be the last is not worth the compiler's time.
        """
        if self.settles and self.phase is Phase.COEXECUTION:
            self._enter_coexecution()
        self.settles = False

    def narrow(self) -> None:
        """If it is time, leaves out what no iteration has done for long, until one does it after all."""
        if not self.narrows or self.compiling or self.phase is not Phase.COEXECUTION:
            return
        assert self.graph is not None
        self.narrows = False
        whole = live(self.graph, None, self.updates.apart)
        graph = live(whole, self._ways)
        self._narrowed = graph != whole
        if not self._narrowed:
            return
        log.info("%s: iteration %d: from here on only the latest ways", self.key, self.iteration)
        if self.options.background:
            self._waits_for(compile_in_background(graph))
        if not self.compiling:
            self._enter_coexecution()

    def make_room(self, *, eagerly: bool) -> None:
        """Before an iteration: gives back what those that ran in the other way have freed.

        Eager ones use the memory of Python's thread, others what is kept for the GraphRunner's; holding both
        would be twice as much.
        """
        if core is not None and eagerly != self._ran_eagerly:
            (core.give_memory_back if eagerly else core.trim_memory)()
        self._ran_eagerly = eagerly

    def _remember(self, *, fell_back: bool) -> None:
        window = WINDOW_ALONE if core is None else WINDOW
        self.recent = [*self.recent[1 - window :], fell_back]

    def find_captured(self) -> Found | None:
        """The captured tensors of the next iteration; None if one that is needed is gone."""
        assert self._captures is not None
        return self._captures.find()

    def lost_capture(self) -> None:
        """A captured tensor is gone: programs that replace it are traced again."""
        why = cause("CX0004", "a tensor that every trace used no longer exists", self.key)
        self.note(why)
        self._move_to(Phase.TRACING)
        self._forget_traces()
        self.skeleton = None
        self._take_graph(None)
        self.lost += 1
        if self.lost > MAX_LOST:
            self._go_dynamic(why)

    def _forget_traces(self) -> None:
        self.traces, self._merges = [], MergeMemory()

    def tries_tracing(self) -> bool:
        """Whether the next iteration of the dynamic phase is traced, to see if the graph covers it."""
        due = self._retry_after <= LAST_RETRY and self._until_retry <= 0
        return due and self._dynamic_s >= RETRY_COST * self._merge_s

    def ran_dynamically(self, sent: int, waits: Counter[tuple[str, str]], seconds: float) -> None:
        """Takes in an iteration of the dynamic phase, and how long it took."""
        self.sent += sent
        self.waits += waits
        self._ran_without_a_graph(seconds, Choice.USUAL)

    def ran_eagerly(self, seconds: float) -> None:
        """Takes in an iteration that ran eagerly, to see whether that is faster or because it is."""
        if self.phase is Phase.COEXECUTION:
            self.ran_on_the_graph(seconds, Choice.EAGER)
        else:
            self._ran_without_a_graph(seconds, Choice.EAGER)

    def _ran_without_a_graph(self, seconds: float, way: Choice) -> None:
        self._dynamic_s += seconds
        self._until_retry -= 1
        if self.call_by_call.took(seconds, way) and self.call_by_call.fastest is Choice.EAGER:
            self.note(cause("CX0120", "call by call, as measured by turns", self.key))

    def ran_on_the_graph(self, seconds: float, way: Choice) -> None:
        """Takes in an iteration of the co-execution phase where there is a choice of ways."""
        if not self.on_graph.took(seconds, way):
            return
        log.info("%s: iteration %d: %s", self.key, self.iteration, _NEWS[self.on_graph.fastest])
        if self.on_graph.fastest is Choice.EAGER:
            self.note(cause("CX0120", "on the graph, as measured by turns", self.key))

    def entered(self) -> Choice:
        """An asynchronous iteration begins: takes in how long the one before took, until here.

        Returns:
            In which way this one runs.
        """
        now = time.perf_counter()
        if self._entered is not None:
            began, way = self._entered
            self.ran_on_the_graph(now - began, way)
        way = self.on_graph.next()
        self._entered = now, way
        return way

    def note(self, why: Cause) -> None:
        """Remembers a cause for `explain`."""
        log.info("%s: iteration %d: %s", self.key, self.iteration, why)
        if len(self.causes) < 1000:
            self.causes.append((self.iteration, why))

    def _move_to(self, phase: Phase) -> None:
        """The next iteration is of another phase, or of the same one."""
        if phase is not self.phase:
            log.info("%s: iteration %d: from here on in the %s phase", self.key, self.iteration, phase.value)
        self.phase = phase

    def _go_dynamic(self, why: Cause) -> None:
        """Runs the program call by call until a traced iteration is covered by the graph."""
        if core is None:  # one more trace may cover the rest; a program that keeps falling back is left alone
            if why.reason.id == "CX0117":
                self.give_up(why)
            return
        if self.dynamic_cause is None:
            log.info("%s: co-executed call by call: %s", self.key, why)
        self.dynamic_cause = why
        self.stop_compiling()
        self._move_to(Phase.DYNAMIC)
        self.skeleton, self.recent, self.uncovered = None, [], 0
        self._until_retry = self._retry_after
        self._retry_after *= 2

    def give_up(self, why: Cause) -> None:
        """No more traces: the program runs call by call from now on, or eagerly without a native core."""
        self.note(why)
        if core is not None:
            self._retry_after = LAST_RETRY
            self._go_dynamic(why)
            self._forget_traces()
            self._take_graph(None)
            return
        log.warning("coexec leaves %s to eager execution: %s. %s", self.key, why, why.reason.hint)
        self.eager_cause = why
        self.stop_compiling()
        self._move_to(Phase.EAGER)
        self._forget_traces()
        self.skeleton = None

    def _untraceable(self, why: Cause | None) -> None:
        if why is None:
            return
        if why.reason.id == "CX0002":
            self.note(why)
            return
        self.strikes += 1
        if self.strikes >= STRIKES:
            self.give_up(why)
            return
        self.note(why)
        if self.phase is Phase.DYNAMIC:
            self._go_dynamic(why)

    @collector.put_off()
    def _enter_coexecution(self) -> None:
        assert self.graph is not None
        began = time.perf_counter()
        graph = live(self.graph, self._ways if self._narrowed else None, self.updates.apart)
        try:
            made = self._make_program(graph)
        except SharedShadow:
            self.give_up(cause("CX0115", "see the traces", self.key))
            return
        if self.options.check:
            verify_program(graph, made.program)
        if made.why_aten is not None:
            if self._narrowed and self._compiles:
                self._narrowed, self._returns = False, True  # what there is serves better
                return
            self.note(cause("CX0201", made.why_aten, self.key))
        self._compiles = made.why_aten is None
        self.skeleton = make_skeleton(graph, made.program)
        references = self.identities.references(graph.captured)
        self._captures = Captures(references, self.skeleton.captured, self.skeleton.bound)
        self._measure_ways(made.program)
        self.dynamic_cause = None
        self.compile_s.append(time.perf_counter() - began)
        self._move_to(Phase.COEXECUTION)

    def _measure_ways(self, program: Program) -> None:
        """Begins to measure in which way iterations are the fastest; another trace does not change that."""
        self._entered = None
        crowded = (program.threads or torch.get_num_threads()) >= processors()
        late = (Choice.LATE,) if crowded and self.options.synchronous else ()
        # Compiled blocks come later, and round in another way: which one has to be the same in each run.
        exact = self.options.executor == "aten"
        eager = (Choice.EAGER,) if exact and self.options.eager_if_faster else ()
        ways = (Choice.USUAL, *late, *eager)
        if ways != self.on_graph.ways or not exact:
            self.on_graph = Pace(ways)

    def _make_program(self, graph: TraceGraph) -> Made:
        """The program of a graph; for the time being `aten`'s, if blocks are compiled later."""
        self.stop_compiling()
        if self.unsettled:
            return make_program(graph, "aten")
        made = make_program(graph, self.options.executor, background=self.options.background)
        self._waits_for(made.compilation)
        return made

    def _waits_for(self, compilation: Compilation | None) -> None:
        self._compilation = compilation
        if compilation is not None:
            log.info("%s: %d blocks are being compiled", self.key, compilation.blocks)

    @property
    def compiling(self) -> int:
        """How many blocks another process compiles now."""
        return 0 if self._compilation is None else self._compilation.blocks

    def stop_compiling(self) -> None:
        """Ends the compilation in the background, if there is one."""
        if self._compilation is not None:
            self._compilation.stop()
            self._compilation = None

    def take_compiled(self) -> None:
        """Goes over to the compiled program if it has become ready since the last iteration."""
        compilation = self._compilation
        if compilation is None or not compilation.is_done() or self.phase is not Phase.COEXECUTION:
            return
        seconds = time.perf_counter() - compilation.began
        failure = compilation.failure()
        self.stop_compiling()
        if failure is not None:
            self.note(cause("CX0201", failure, self.key))
            return
        log.info("%s: %d blocks compiled in %.1f s", self.key, compilation.blocks, seconds)
        self._enter_coexecution()
