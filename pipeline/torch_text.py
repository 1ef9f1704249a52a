"""Programs in the text that torch.distributed.pipelining writes and loads.

In:  one row of actions a rank, such as `0F3`, `0SEND_F3`, `1RECV_F3`, `1B3`.
Out: a `Program`; and back, for what torch can express: a chain of stages, one rank each, no transfers, no
     weight versions.

In torch a pass waits by itself for what it receives, so that waits appear and disappear here. The update is
the caller's, after `REDUCE_GRAD` has scaled gradients. Sharding (`UNSHARD`, `RESHARD`) is not looked at. Only
text, torch is not imported; `torch_schedule` makes a schedule of it.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.actions import Action, Compute, Kind, Message, Wait, Weights
from pipeline.errors import ProgramError
from pipeline.passes.communication import add_communication
from pipeline.program import Layout, Program, StageLayout
from pipeline.schedules.synchronous import finish

COMPUTE = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}
"""torch's letters."""

_LETTER = {kind: letter for letter, kind in COMPUTE.items()}
_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")
_OVERLAP = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def from_torch(rows: Sequence[Sequence[str]]) -> Program:
    """The program of one batch that torch's rows say; with messages, if they have none.

    Raises:
        ProgramError: A row holds something else, or stages and micro-batches don't add up.
    """
    parts = [[part for text in row for part in _parts(text)] for row in rows]
    layout = _layout(parts)
    ranks: list[tuple[Action, ...]] = []
    for r, row in enumerate(parts):
        actions: list[Action] = []
        for text in row:
            if match := _COMPUTE.fullmatch(text):
                stage, letter, k = match.groups()
                actions.append(Compute(COMPUTE[letter], int(stage), int(k)))
            elif match := _MESSAGE.fullmatch(text):
                actions.append(_message(layout, match))
        ranks.append((*actions, *finish(layout, r)))
    program = Program(layout, tuple(ranks))
    if not any(isinstance(a, Message) for actions in program.ranks for a in actions):
        return add_communication(program)
    return Program(layout, tuple(tuple(_with_waits(actions)) for actions in program.ranks))


def to_torch(program: Program) -> list[list[str]]:
    """The rows, with messages, that torch can load.

    Raises:
        ProgramError: torch has no word for something in the program.
    """
    layout = program.layout
    chain = tuple((s, s + 1) for s in range(len(layout.stages) - 1))
    if layout.edges != chain:
        raise ProgramError(f"torch runs chains of stages; these have the edges {layout.edges}.")
    for s, stage in enumerate(layout.stages):
        if len(stage.ranks) > 1:
            raise ProgramError(f"torch has no replicas in a schedule; stage {s} is on ranks {stage.ranks}.")
        if stage.size != layout.stages[0].size:
            raise ProgramError(
                f"torch has one micro-batch size; stage {s} has {stage.size} and stage 0"
                f" {layout.stages[0].size}."
            )
        if stage.update != layout.samples:
            raise ProgramError(f"torch runs one batch; stage {s} has an update every {stage.update} samples.")
    size = layout.stages[0].size
    return [
        [text for action in _late_receives(actions) for text in _torch_text(action, size, f"rank {r}")]
        for r, actions in enumerate(program.ranks)
    ]


def write_csv(program: Program, path: str | Path) -> None:
    """Write the rows of a program for torch's loader, format `compute_comms`.

    Raises:
        ProgramError: torch can't express the program.
    """
    rows = to_torch(program)
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)


def _late_receives(actions: Sequence[Action]) -> Iterator[Action]:
    """The same with each receive as late as waits and the order of messages from its rank let it be.

    A receive that torch finds before its message can be sent counts as a deadlock in its dry run.
    """
    to_start: dict[int, deque[Message]] = defaultdict(deque)
    started: set[Message] = set()
    for action in actions:
        if isinstance(action, Message) and action.kind is Kind.RECEIVE:
            to_start[action.peer].append(action)
    for action in actions:
        if isinstance(action, Message) and action.kind is Kind.RECEIVE:
            continue
        if isinstance(action, Wait) and isinstance(action.on, Message):
            while action.on.kind is Kind.RECEIVE and action.on not in started:
                message = to_start[action.on.peer].popleft()
                started.add(message)
                yield message
        yield action


def _torch_text(action: Action, size: int, where: str) -> Iterator[str]:
    if isinstance(action, Wait) and isinstance(action.on, Message):
        return
    if isinstance(action, Weights) and action.kind is Kind.UPDATE and action.version == 1:
        yield f"{action.stage}REDUCE_GRAD"
    elif isinstance(action, Compute) and action.kind in _LETTER and action.version == 0:
        yield f"{action.stage}{_LETTER[action.kind]}{action.micro_batch}"
    elif isinstance(action, Message):
        here = action.source if action.kind is Kind.SEND else action.target
        yield f"{here}{action.kind.value}_{'B' if action.gradient else 'F'}{action.start // size}"
    else:
        raise ProgramError(f"{where}: torch has no word for {action}.")


def _parts(text: str) -> Iterator[str]:
    """The actions in one text; none for what is not looked at."""
    text = text.strip()
    if match := _OVERLAP.fullmatch(text):
        yield from _parts(match[1])
        yield from _parts(match[2])
    elif _COMPUTE.fullmatch(text) or _MESSAGE.fullmatch(text):
        yield text
    elif text and not _IGNORED.fullmatch(text):
        raise ProgramError(f"{text!r} is no action of torch's.")


def _layout(parts: Sequence[Sequence[str]]) -> Layout:
    owners: dict[int, int] = {}
    micro_batches = 0
    for r, row in enumerate(parts):
        for text in row:
            if match := _COMPUTE.fullmatch(text):
                owner = owners.setdefault(int(match[1]), r)
                if owner != r:
                    raise ProgramError(f"stage {match[1]} is on rank {owner} and on rank {r}.")
                micro_batches = max(micro_batches, int(match[3]) + 1)
    if sorted(owners) != list(range(len(owners))):
        raise ProgramError(f"stages {sorted(owners)} are not numbered from 0 without gaps.")
    stages = tuple(StageLayout(1, (owners[s],), micro_batches) for s in range(len(owners)))
    return Layout(stages, tuple((s, s + 1) for s in range(len(owners) - 1)), micro_batches)


def _message(layout: Layout, match: re.Match[str]) -> Message:
    here, kind, payload, k = int(match[1]), Kind(match[2]), match[3], int(match[4])
    gradient = payload == "B"
    step = (-1 if gradient else 1) * (1 if kind is Kind.SEND else -1)
    there = here + step
    if not (0 <= here < len(layout.stages) and 0 <= there < len(layout.stages)):
        raise ProgramError(f"{match[0]} goes to a stage that does not exist.")
    source, target = (here, there) if kind is Kind.SEND else (there, here)
    return Message(kind, gradient, source, target, k, k + 1, layout.owner(there, k))


def _with_waits(actions: Sequence[Action]) -> Iterator[Action]:
    received = {
        (a.gradient, a.target, a.start): a
        for a in actions
        if isinstance(a, Message) and a.kind is Kind.RECEIVE
    }
    for action in actions:
        if isinstance(action, Compute) and action.kind is not Kind.BACKWARD_WEIGHT:
            gradient = action.kind is not Kind.FORWARD
            message = received.get((gradient, action.stage, action.micro_batch))
            if message is not None:
                yield Wait(message)
        yield action
