"""Nothing is used before it is there: data of other stages, saved activations, transfers.

Goes through each rank's actions in order with what the rank has at that point. Whether the other side does
its part is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from pipeline.actions import Action, Compute, Kind, Message, Transfer, Wait
from pipeline.dependencies import Result, inputs_of, result_of
from pipeline.memory import recomputed_items
from pipeline.program import Layout, Program
from pipeline.validator.problems import Problem, problem

Item = tuple[int, int]


@dataclass(slots=True)
class _State:
    """What a rank has done and holds so far."""

    made: set[Result] = field(default_factory=set)
    received: set[Message] = field(default_factory=set)
    started: set[Message | Transfer] = field(default_factory=set)
    finished: set[Message | Transfer] = field(default_factory=set)
    saved: dict[Item, str] = field(default_factory=dict)
    recomputed: set[Item] = field(default_factory=set)


def order_problems(program: Program) -> list[Problem]:
    """Uses of what is not there, on each rank."""
    layout = program.layout
    recomputed = recomputed_items(program)
    problems = []
    for r, actions in enumerate(program.ranks):
        state = _State()
        for i, action in enumerate(actions):
            problems += [
                problem(program, r, i, reason) for reason in _step(layout, r, state, recomputed, action)
            ]
        for started in actions:
            if (
                isinstance(started, Message | Transfer)
                and started.kind is not Kind.SEND
                and started not in state.finished
            ):
                problems.append(problem(program, r, len(actions), f"{started} is never waited for"))
    return problems


def _step(layout: Layout, rank: int, state: _State, recomputed: Set[Item], action: Action) -> Iterator[str]:
    """What is wrong with an action in a state, which it then changes."""
    if isinstance(action, Compute):
        yield from _inputs(layout, rank, state, action)
        yield from _saved(state, recomputed, action)
        if (made := result_of(action)) is not None:
            state.made.add(made)
    elif isinstance(action, Message):
        if action.kind is Kind.SEND:
            made = Result(action.gradient, action.source, action.start // layout.stages[action.source].size)
            if made not in state.made:
                yield "what is sent has not been computed yet"
        state.started.add(action)
    elif isinstance(action, Transfer):
        yield from _transfer(state, action)
        state.started.add(action)
    elif isinstance(action, Wait):
        if action.on not in state.started:
            yield "waits for something that has not been started"
        state.finished.add(action.on)
        if isinstance(action.on, Message):
            state.received.add(action.on)
        else:
            _arrive(state, action.on)


def _inputs(layout: Layout, rank: int, state: _State, action: Compute) -> Iterator[str]:
    for result in inputs_of(layout, action):
        peer = layout.owner(result.stage, result.micro_batch)
        what = "gradient" if result.gradient else "output"
        if peer == rank:
            if result not in state.made:
                yield f"needs the {what} of stage {result.stage} for micro-batch {result.micro_batch}"
            continue
        samples = layout.shared_samples(action.stage, action.micro_batch, result.stage, result.micro_batch)
        message = Message(
            Kind.RECEIVE,
            result.gradient,
            result.stage,
            action.stage,
            samples.start,
            samples.stop,
            peer,
        )
        if message not in state.received:
            yield (
                f"needs the {what} of stage {result.stage} for samples [{samples.start},{samples.stop}),"
                f" and there is no WAIT {message} before it"
            )


def _saved(state: _State, recomputed: Set[Item], action: Compute) -> Iterator[str]:
    item = (action.stage, action.micro_batch)
    if action.kind is Kind.FORWARD:
        state.saved[item] = "here"
        return
    where = state.saved.get(item)
    if action.kind is Kind.BACKWARD_WEIGHT:
        if where != "half used":
            yield f"needs BI {item[0]} {item[1]} before it"
        state.saved[item] = "used"
        return
    if where != "here":
        yield f"needs what F {item[0]} {item[1]} saved, which is {where or 'not there yet'}"
    if action.kind is Kind.RECOMPUTE:
        state.recomputed.add(item)
        return
    if item in recomputed and item not in state.recomputed:
        yield f"needs RC {item[0]} {item[1]} before it"
    state.saved[item] = "half used" if action.kind is Kind.BACKWARD_INPUT else "used"


def _transfer(state: _State, action: Transfer) -> Iterator[str]:
    item = (action.stage, action.micro_batch)
    where = state.saved.get(item)
    wanted = {
        Kind.EVICT: "here",
        Kind.LOAD: f"on rank {action.peer}",
        Kind.ACCEPT: None,
        Kind.RETURN: f"held for rank {action.peer}",
    }[action.kind]
    if where != wanted or (action.kind is Kind.EVICT and item in state.recomputed):
        yield f"what F {item[0]} {item[1]} saved is {where or 'not here'}, not {wanted or 'absent'}"
    state.saved[item] = f"in transit ({action})"


def _arrive(state: _State, transfer: Transfer) -> None:
    item = (transfer.stage, transfer.micro_batch)
    if transfer.kind is Kind.RETURN:
        state.saved.pop(item, None)
    elif transfer.kind is Kind.EVICT:
        state.saved[item] = f"on rank {transfer.peer}"
    elif transfer.kind is Kind.ACCEPT:
        state.saved[item] = f"held for rank {transfer.peer}"
    else:
        state.saved[item] = "here"
