"""Fallback: an iteration that left the TraceGraph becomes an eager one.

In:  a PythonRunner in the middle of an iteration, nothing of which has been committed.
Out: the iteration as eager execution would have made it so far, recorded as a trace.

The matched events are run again, eagerly and in order. Each new tensor takes the place of the
placeholder that Python already holds.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from coexec._private import StopRecomputing, WithoutModes
from coexec.callbacks.iteration import Callbacks
from coexec.runners.placeholder import realize
from coexec.runners.python_runner import PythonRunner
from coexec.runners.records import EventRecord, FlagRecord, GradRecord, Token
from coexec.tracegraph import calls
from coexec.tracegraph.ambient import restored
from coexec.tracegraph.copies import copied, overwrite
from coexec.tracegraph.graph import Node
from coexec.tracegraph.trace import Kind, Produced


class Recorder(Protocol):
    """What a replay needs of `coexec.tracer.recorder.Recorder`."""

    def event(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        location: int,
        adopt: Callable[[Any], Any],
        make: Callable[..., Any] | None,
    ) -> Any:
        """Runs a torch call eagerly and records it."""

    def fail(self, id_: str, detail: str) -> None:
        """Gives the recording up."""


def replay(runner: PythonRunner, recorder: Recorder) -> None:
    """Cancels the graph's iteration and runs its matched events through `recorder`.

    Args:
        runner: the PythonRunner that gives up; none of its function modes may be active.
        recorder: runs each event eagerly, and records it.

    Raises:
        Exception: what the first event raised that failed; those after it that only compute have been run.
    """
    runner.graph_runner.cancel()
    runner.graph_runner.finish()
    runner.restore_random_state()
    it = runner.iteration
    exposed = [r.exposure for r in it.records if isinstance(r, EventRecord) and r.exposure is not None]
    exposed += it.inputs.values()
    with WithoutModes():  # nothing that the recorder has to see
        written = [copied(e.memory) for e in exposed]
        for exposure in exposed:
            overwrite(exposure.memory, exposure.contents)
    objects = {Produced(*place): symbol.tensor for place, symbol in it.placeholders.items()}
    it.symbols.clear()
    it.placeholders.clear()
    for record in reversed(it.records):
        if isinstance(record, FlagRecord):
            record.tensor.requires_grad_(record.before)
    with runner.callbacks.passes.replayed(runner.callbacks.find):
        error = _Again(objects, recorder, runner.callbacks, it.pieces).make(it.records)
    with WithoutModes():
        for exposure, contents in zip(exposed, written, strict=True):
            overwrite(exposure.memory, contents)
    it.records.clear()
    if error is not None:
        raise error


@dataclass(frozen=True)
class _Again:
    """Makes what was recorded again.

    Attributes:
        objects: the tensor object that each output is in Python.
        recorder: runs each event eagerly.
        callbacks: the user's code that autograd calls.
        pieces: of each backward pass in pieces, by the node that begins it.
    """

    objects: dict[Produced, torch.Tensor]
    recorder: Recorder
    callbacks: Callbacks
    pieces: Mapping[int, Sequence[tuple[Node, Sequence[Token]]]]

    def make(self, all_records: Sequence[object]) -> Exception | None:
        """Makes all calls again; returns what the first one raised that failed."""
        failed: set[Produced] = set()
        error: Exception | None = None
        # Calls of one state run under one restored state: leaving autocast would drop its casts.
        for _, group in itertools.groupby(all_records, key=_state):
            records = list(group)
            state = _state(records[0])
            with contextlib.nullcontext() if state is None else restored(state):
                for record in records:
                    if error is not None and not _only_computes(record, failed):
                        failed |= _outputs(record)
                        continue
                    try:
                        self._redo(record)
                    except Exception as e:  # what does not depend on it has to be there when Python goes on
                        error = error or e
                        failed |= _outputs(record)
        return error

    def _redo(self, record: object) -> None:
        match record:
            case FlagRecord():
                record.tensor.requires_grad_(record.after)
            case GradRecord():
                value = None if record.value is None else self._tensor(record.value)
                self._tensor(record.leaf).grad = value
            case EventRecord():
                self._run(record)

    def _run(self, record: EventRecord) -> None:
        node = record.node
        explicit = len(record.tokens) - len(node.implicit_metas)
        tensors = [self._tensor(t) for t in record.tokens[:explicit]]
        args, kwargs = calls.unflatten(record.key, tensors, record.numbers)

        def adopt(returned: Any) -> Any:
            if node.kind is Kind.FETCH:
                return returned
            outputs = [self.objects[Produced(node.id, number)] for number in range(len(node.outputs))]
            for number, tensor in calls.new_tensors(node.result, returned):
                realize(outputs[number], tensor)
            self._realize_gradients(node, record.tokens)
            for piece, tokens in self.pieces.get(node.id, ()):  # the pass was made as a whole
                self._realize_gradients(piece, tokens)
            return calls.build(node.result, outputs, tensors)

        with contextlib.suppress(StopRecomputing):  # the user's code has seen that
            make = self.callbacks.maker(node.function)
            self.recorder.event(node.function, args, kwargs, record.location, adopt, make=make)
        self.callbacks.recorded(node.function, args)
        if record.exposure is not None and record.exposure.alive:
            self.recorder.fail("CX0114", "an array that shares memory with a tensor is still in use")
            _share(tensors[0], record.exposure.memory)

    def _realize_gradients(self, node: Node, tokens: Sequence[Token]) -> None:
        for grad in node.grads:
            leaf = self._tensor(tokens[grad.leaf])
            if leaf.grad is not None:
                realize(self.objects[Produced(node.id, grad.output)], leaf.grad)

    def _tensor(self, token: Token) -> torch.Tensor:
        assert token is not None
        return self.objects[token] if isinstance(token, Produced) else token


def _only_computes(record: object, failed: set[Produced]) -> bool:
    """Whether a record makes tensors of what is there, and changes nothing."""
    if not isinstance(record, EventRecord) or record.node.backward:
        return False
    changes = any(o.writes or o.random for o in record.node.operations)
    return not changes and failed.isdisjoint(t for t in record.tokens if isinstance(t, Produced))


def _outputs(record: object) -> set[Produced]:
    node = record.node if isinstance(record, EventRecord) else None
    return set() if node is None else {Produced(node.id, i) for i in range(len(node.outputs))}


def _state(record: object) -> Hashable:
    return record.ambient if isinstance(record, EventRecord) else None


def _share(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Puts a tensor on the memory that an array in Python's hands already has."""
    with torch.no_grad(), WithoutModes():
        tensor.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
