"""Sessions: what runs between a tape's entry and its exit.

In:  the state of a program, whose block has been entered.
Out: a session, which ends when the block is left; the state has then taken in what it found.

In the tracing phase an iteration is recorded (`tracing`), in the co-execution phase it is the skeleton beside
the graph (`coexecution`) and becomes a trace where it leaves that, in the dynamic phase its calls are sent
one by one (`dynamic`). Where that is measured to be faster it runs as it is (`eager`).
"""

from __future__ import annotations

import threading
from types import FrameType

import torch

from coexec._private import foreign_modes
from coexec.options import Options
from coexec.pace import Choice
from coexec.profile.profile import active_profile
from coexec.program_state import Phase, ProgramState
from coexec.reasons import cause
from coexec.sessions.coexecution import CoexecutionSession
from coexec.sessions.dynamic import DynamicSession
from coexec.sessions.eager import EagerSession
from coexec.sessions.session import Session
from coexec.sessions.tracing import TracingSession


def begin(state: ProgramState, frame: FrameType, options: Options) -> Session | None:
    """Begins an iteration; None if it runs eagerly and the state has nothing to learn from it.

    Args:
        state: of the program.
        frame: whose block it is.
        options: of the tape.
    """
    if state.phase is Phase.EAGER:
        state.steps["eager"] += 1
        return None
    modes = foreign_modes()
    if modes or state.running:
        why = ("CX0113", f"{', '.join(modes)}") if modes else ("CX0119", "its previous iteration still runs")
        state.note(cause(*why, state.key))
        state.steps["eager"] += 1
        return None
    state.running = True
    if state.phase is Phase.DYNAMIC and not state.tries_tracing():
        if options.eager_if_faster and state.call_by_call.next() is Choice.EAGER and _is_timed():
            state.make_room(eagerly=True)
            return EagerSession(state, timed=True)
        state.make_room(eagerly=False)
        return DynamicSession(state, options)
    session = _with_graph(state, frame, options) if state.phase is Phase.COEXECUTION else None
    if session is None:
        state.make_room(eagerly=False)
        session = TracingSession(state, frame)
    return session


def _with_graph(state: ProgramState, frame: FrameType, options: Options) -> Session | None:
    """Begins an iteration of the co-execution phase; None if the program has to be traced again."""
    before = state.pending
    state.take_compiled()
    state.narrow()
    state.settle()
    way = None
    if _may_choose(state, options):
        way = state.on_graph.next() if options.synchronous else state.entered()
    captured = None if way is Choice.EAGER else state.find_captured()
    if captured is not None:
        state.make_room(eagerly=False)
        return CoexecutionSession(state, frame, captured, options, way, before)
    if before is not None:
        before.settle()
    if way is Choice.EAGER:
        state.make_room(eagerly=True)
        return EagerSession(state, timed=options.synchronous)
    state.lost_capture()
    return None


def may_run_ahead(state: ProgramState, options: Options) -> bool:
    """Whether the next iteration may begin while the one before is unfinished."""
    pending = state.pending
    return (
        pending is not None
        and pending.thread == threading.get_ident()
        and state.phase is Phase.COEXECUTION
        and not state.compiling
        and not state.narrows
        and not state.settles
        and not options.synchronous
        and options.mode == "coexec"
        and active_profile() is None
        and not foreign_modes()
    )


def _is_timed() -> bool:
    """Whether it can be seen in which way iterations are faster: a GPU's time is not Python's."""
    return not torch.cuda.is_initialized()


def _may_choose(state: ProgramState, options: Options) -> bool:
    """Whether iterations with a graph may run in several ways, to see which is the fastest."""
    ways = state.on_graph.ways
    allowed = options.mode == "coexec" and (options.eager_if_faster or Choice.EAGER not in ways)
    return allowed and len(ways) > 1 and active_profile() is None and _is_timed()
