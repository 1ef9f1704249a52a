"""What a rank does, one step at a time, and the strict text that it is written in.

In:  text such as `F 0 3 w0`, or values.
Out: an `Action`: a `Compute`, `Message`, `Transfer`, `Weights` or `Wait`.

    F 0 3 w0                 stage 0 runs the forward pass of micro-batch 3 with weight version 0
    B, BI, BW, RC            backward; its input part; its weight part; forward again (recompute)
    SEND act 0>1 [6,8) @1    start sending stage 0's output for samples 6 and 7 to stage 1, on rank 1
    RECV grad 1>0 [6,8) @1   start receiving the gradient for them from stage 1, on rank 1
    EVICT 0 3 @3             start moving what stage 0 saved for micro-batch 3 to rank 3, ...
    ACCEPT 0 3 @0            ... which holds it for rank 0
    LOAD 0 3 @3              start getting it back from rank 3, ...
    RETURN 0 3 @0            ... which lets it go
    STASH 0 w2               keep version 2 of stage 0's weights beyond the next update
    REDUCE 0 w3              add up the gradients for version 3 over the replicas of stage 0
    UPDATE 0 w3              make version 3 of stage 0's weights
    WAIT SEND act 0>1 [6,8) @1   go on when that has completed; so for all that is started

Actions that start something return at once. Printing what was parsed gives the same text, byte for byte.
These are named tuples and not frozen dataclasses: a program of 96 stages and 1,536 micro-batches has
1.4 million of them, and a tuple is made in 0.3 microseconds where a frozen dataclass takes 1.0.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple, overload

from pipeline.errors import ProgramError


class Kind(Enum):
    """What an action is; the value is the word in the text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    RECOMPUTE = "RC"
    SEND = "SEND"
    RECEIVE = "RECV"
    EVICT = "EVICT"
    ACCEPT = "ACCEPT"
    LOAD = "LOAD"
    RETURN = "RETURN"
    STASH = "STASH"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"

    __hash__ = object.__hash__  # members are singletons; hashing their name costs time in every set


class Compute(NamedTuple):
    """Computation of one micro-batch of one stage, with one version of the stage's weights."""

    kind: Kind
    stage: int
    micro_batch: int
    version: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value} {self.stage} {self.micro_batch} w{self.version}"


class Message(NamedTuple):
    """One end of a message between stages: samples `start` up to `stop`, from stage `source` to `target`.

    `gradient` says what is in it; `peer` is the rank at the other end.
    """

    kind: Kind
    gradient: bool
    source: int
    target: int
    start: int
    stop: int
    peer: int

    def __str__(self) -> str:
        payload = "grad" if self.gradient else "act"
        samples = f"[{self.start},{self.stop})"
        return f"{self.kind.value} {payload} {self.source}>{self.target} {samples} @{self.peer}"


class Transfer(NamedTuple):
    """One end of a transfer of what a stage saved for a micro-batch; `peer` is the rank at the other end."""

    kind: Kind
    stage: int
    micro_batch: int
    peer: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.stage} {self.micro_batch} @{self.peer}"


class Weights(NamedTuple):
    """Something done to a version of a stage's weights."""

    kind: Kind
    stage: int
    version: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.stage} w{self.version}"


class Wait(NamedTuple):
    """Waiting until something that was started has completed."""

    on: Message | Transfer

    def __str__(self) -> str:
        return f"WAIT {self.on}"


Action = Compute | Message | Transfer | Weights | Wait

OPPOSITE = {
    Kind.SEND: Kind.RECEIVE,
    Kind.RECEIVE: Kind.SEND,
    Kind.EVICT: Kind.ACCEPT,
    Kind.ACCEPT: Kind.EVICT,
    Kind.RETURN: Kind.LOAD,
    Kind.LOAD: Kind.RETURN,
}
"""What is started at the other end."""

GIVING = frozenset({Kind.SEND, Kind.EVICT, Kind.RETURN})
"""The ends that data come from."""


@overload
def other_end(action: Message, rank: int) -> Message: ...


@overload
def other_end(action: Transfer, rank: int) -> Transfer: ...


def other_end(action: Message | Transfer, rank: int) -> Message | Transfer:
    """What the peer has to start for what a rank starts."""
    return action._replace(kind=OPPOSITE[action.kind], peer=rank)


_KINDS = {kind.value: kind for kind in Kind}
_INT = r"(0|[1-9][0-9]*)"
_COMPUTE = re.compile(rf"(F|B|BI|BW|RC) {_INT} {_INT} w{_INT}")
_MESSAGE = re.compile(rf"(SEND|RECV) (act|grad) {_INT}>{_INT} \[{_INT},{_INT}\) @{_INT}")
_TRANSFER = re.compile(rf"(EVICT|ACCEPT|LOAD|RETURN) {_INT} {_INT} @{_INT}")
_WEIGHTS = re.compile(rf"(STASH|REDUCE|UPDATE) {_INT} w{_INT}")


def parse_action(text: str) -> Action:
    """The action that a line of text says.

    Raises:
        ProgramError: The text is not exactly what printing some action gives.
    """
    if match := _COMPUTE.fullmatch(text):
        kind, stage, micro_batch, version = match.groups()
        return Compute(_KINDS[kind], int(stage), int(micro_batch), int(version))
    if match := _WEIGHTS.fullmatch(text):
        kind, stage, version = match.groups()
        return Weights(_KINDS[kind], int(stage), int(version))
    if text.startswith("WAIT "):
        return Wait(_parse_started(text.removeprefix("WAIT ")))
    return _parse_started(text)


def _parse_started(text: str) -> Message | Transfer:
    if match := _MESSAGE.fullmatch(text):
        kind, payload, *numbers = match.groups()
        source, target, start, stop, peer = map(int, numbers)
        return Message(_KINDS[kind], payload == "grad", source, target, start, stop, peer)
    if match := _TRANSFER.fullmatch(text):
        kind, stage, micro_batch, rank = match.groups()
        return Transfer(_KINDS[kind], int(stage), int(micro_batch), int(rank))
    raise ProgramError(f"{text!r} is no action. The forms are listed in pipeline/actions.py.")
