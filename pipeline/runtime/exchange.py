"""Activations and gradients between stages, on this rank and to others.

In:  messages to start, and passes that read or make something.
Out: the inputs of a pass, put together from its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.actions import Compute, Kind, Message, Wait
from pipeline.dependencies import Result, inputs_of, result_of
from pipeline.program import Program
from pipeline.runtime.channels import Channels, Pending
from pipeline.runtime.sends import Sends
from pipeline.runtime.specs import StageSpec
from pipeline.runtime.stage import Tensors
from pipeline.runtime.values import Values, join


class Exchange:
    """What one rank has received and what it has made, until it is used."""

    def __init__(self, program: Program, rank: int, channels: Channels, device: torch.device) -> None:
        self._layout, self._rank = program.layout, rank
        self._actions = program.ranks[rank]
        self._channels, self._device = channels, device
        self._waited = {action.on for action in self._actions if isinstance(action, Wait)}
        self._received: dict[Message, Tensors] = {}
        self._sends = Sends()

    @property
    def nbytes(self) -> int:
        """Bytes of what has been received, or is about to be, and not yet used."""
        return sum(t.nbytes for tensors in self._received.values() for t in tensors)

    def begin(self, specs: Sequence[StageSpec]) -> None:
        """A run begins."""
        self._specs = specs
        self._values = Values(self._layout, self._rank, self._actions)
        self._received.clear()

    def check(self) -> None:
        """Raise if a send has failed."""
        self._sends.check()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._sends.finish()

    def close(self) -> None:
        """No more is sent."""
        self._sends.close()

    def start(self, message: Message) -> Pending | None:
        """Start sending or receiving; None if nobody waits for it by name."""
        if message.kind is Kind.RECEIVE:
            spec = self._specs[message.target if message.gradient else message.source]
            shapes = spec.gradients if message.gradient else spec.outputs
            samples = message.stop - message.start
            self._received[message] = tuple(t.empty(samples, self._device) for t in shapes)
            return self._channels.start(message, self._received[message])
        size = self._layout.stages[message.source].size
        made = Result(message.gradient, message.source, message.start // size)
        values = self._values.take(made, message.target, message.start, message.stop)
        pending = self._channels.start(message, [t.contiguous() for t in values])
        if message in self._waited:
            return pending
        self._sends.add(pending)
        return None

    def put(self, action: Compute, made: Tensors) -> None:
        """Keep what a pass made: outputs, or gradients of its inputs, for whoever uses them."""
        result = result_of(action)
        assert result is not None
        if not result.gradient:
            self._values.put(result, dict.fromkeys(self._layout.successors[action.stage], made))
            return
        rest = iter(made)
        before = self._layout.predecessors[action.stage]
        self._values.put(result, {p: tuple(next(rest) for _ in self._specs[p].gradients) for p in before})

    def inputs(self, action: Compute) -> tuple[Tensors, list[Message]]:
        """The outputs of the stages before, stage after stage, and the messages that brought them."""
        by_stage, used = self._pieces(action)
        return tuple(t for p in self._layout.predecessors[action.stage] for t in join(by_stage[p])), used

    def gradients(self, action: Compute) -> tuple[Tensors, list[Message]]:
        """The gradients of a stage's outputs, added up over the stages after it, and the messages."""
        by_stage, used = self._pieces(action)
        first, *others = self._layout.successors[action.stage]
        total = join(by_stage[first])
        for t in others:
            total = tuple(a + b for a, b in zip(total, join(by_stage[t]), strict=True))
        return total, used

    def drop(self, used: Sequence[Message]) -> None:
        """Let go of what messages brought."""
        for message in used:
            del self._received[message]

    def _pieces(self, action: Compute) -> tuple[dict[int, list[Tensors]], list[Message]]:
        """What other stages made for a pass, by stage, in the order of samples."""
        found: dict[int, list[Tensors]] = {}
        used: list[Message] = []
        stage, k = action.stage, action.micro_batch
        for result in inputs_of(self._layout, action):
            samples = self._layout.shared_samples(stage, k, result.stage, result.micro_batch)
            peer = self._layout.owner(result.stage, result.micro_batch)
            if peer == self._rank:
                piece = self._values.take(result, stage, samples.start, samples.stop)
            else:
                message = Message(
                    Kind.RECEIVE, result.gradient, result.stage, stage, samples.start, samples.stop, peer
                )
                piece = self._received[message]
                used.append(message)
            found.setdefault(result.stage, []).append(piece)
        return found, used
