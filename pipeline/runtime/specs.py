"""What ranks agree on before a program runs: the program itself, and the shapes of what they exchange.

In:  each rank's program and stages, and the data of one micro-batch.
Out: a `StageSpec` for each stage, the same on every rank.

Receives start before anything has been sent, so that both ends must know sizes beforehand. Every stage is
tried once, in order, on zeros in the shape of its inputs; buffers and generators are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.plans import StageCost
from pipeline.program import Layout, Program
from pipeline.runtime.errors import RunError
from pipeline.runtime.place import Place
from pipeline.runtime.stage import StageRunner, Tensors
from pipeline.schedules.synchronous import topological

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a stage's output: the shape of one sample, and the type."""

    sample: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, samples: int, device: torch.device) -> torch.Tensor:
        """Room for some samples."""
        return torch.empty((samples, *self.sample), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What is known of a stage.

    Attributes:
        outputs: What it sends along each outgoing edge.
        saved: Bytes of each storage that it saves for backward, for one of its micro-batches.
        kept: The same when it recomputes: of its inputs.
        parameter_bytes: Of one version of its weights.
    """

    outputs: tuple[TensorSpec, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    parameter_bytes: int

    @property
    def gradients(self) -> tuple[TensorSpec, ...]:
        """What comes back along each outgoing edge: gradients of the floating-point outputs."""
        return tuple(spec for spec in self.outputs if spec.dtype.is_floating_point)


def costs(layout: Layout, specs: Sequence[StageSpec]) -> tuple[StageCost, ...]:
    """Measured bytes as the costs that validator and simulator read."""
    return tuple(
        StageCost(
            output_bytes=float(sum(t.empty(layout.stages[s].size, _META).nbytes for t in spec.outputs)),
            parameter_bytes=float(spec.parameter_bytes),
            saved_bytes=float(sum(spec.saved)),
            input_bytes=float(sum(spec.kept)),
        )
        for s, spec in enumerate(specs)
    )


def agree_on_program(program: Program) -> None:
    """Check that every rank has the same program.

    Raises:
        RunError: Some rank doesn't; with the first line in which they differ.
    """
    text = str(program)
    digests: list[bytes] = [b""] * dist.get_world_size()
    with _together("compare programs"):
        dist.all_gather_object(digests, blake2b(text.encode()).digest())
    different = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if not different:
        return
    first = _broadcast(text, 0)
    if text == first:
        raise RunError(f"rank 0 has another program than ranks {different}.")
    for number, (here, there) in enumerate(zip_longest(text.splitlines(), first.splitlines()), 1):
        if here != there:
            raise RunError(
                f"rank {dist.get_rank()} has another program than rank 0: line {number} of it is {here!r} and"
                f" there {there!r}. Start all ranks with the same plan."
            )


def agree_on_specs(
    layout: Layout, place: Place, runners: Mapping[int, StageRunner], data: Mapping[int, Tensors]
) -> tuple[StageSpec, ...]:
    """Try every stage on its first replica, and tell all ranks what came out.

    Args:
        layout: The stages.
        place: Which process of which rank this is.
        runners: The stages of this rank.
        data: For stages of this rank, the data of one micro-batch.
    """
    specs: dict[int, StageSpec | RunError] = {}
    for s in topological(layout):
        owner = layout.stages[s].ranks[0]
        found: StageSpec | RunError | None = None
        if place.rank == owner:
            try:
                found = _try(layout, s, runners[s], specs, data.get(s, ()))
            except Exception as error:  # told to all, so that none waits for what never comes
                found = RunError(f"rank {owner}, trying stage {s}: {error}")
        result = _broadcast(found, owner * place.members)
        if result is None or isinstance(result, RunError):
            raise result or RunError(f"rank {owner} said nothing about stage {s}.")
        specs[s] = result
    return tuple(spec for _, spec in sorted(specs.items()) if isinstance(spec, StageSpec))


_META = torch.device("meta")


def _try(
    layout: Layout,
    stage: int,
    runner: StageRunner,
    specs: Mapping[int, StageSpec | RunError],
    data: Tensors,
) -> StageSpec:
    size = layout.stages[stage].size
    before = [specs[p] for p in layout.predecessors[stage]]
    inputs = tuple(
        tensor.empty(size, runner.device).zero_()
        for spec in before
        if isinstance(spec, StageSpec)
        for tensor in spec.outputs
    )
    outputs, saved = runner.trial(inputs, data)
    kept = tuple(t.nbytes for t in inputs)
    parameter_bytes = runner.weights.nbytes
    if not layout.successors[stage]:
        if len(outputs) != 1 or outputs[0].dim() != 0:
            shapes = [list(t.shape) for t in outputs]
            raise RunError(
                f"nothing follows the stage, so it must give its loss, one number; it gave {shapes}."
            )
        return StageSpec((), saved, kept, parameter_bytes)
    for t in outputs:
        if t.dim() == 0 or t.shape[0] != size:
            raise RunError(
                f"outputs must have the {size} samples as first dimension; one has {list(t.shape)}."
            )
    return StageSpec(
        tuple(TensorSpec(tuple(t.shape[1:]), t.dtype) for t in outputs), saved, kept, parameter_bytes
    )


def _broadcast(value: T, source: int) -> T:
    box = [value]
    with _together(f"hear from process {source}"):
        dist.broadcast_object_list(box, src=source)
    return box[0]


@contextmanager
def _together(what: str) -> Iterator[None]:
    """What all ranks have to do together inside."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"process {dist.get_rank()} could not {what} before the first action: some rank is gone, or never"
            f" came so far ({str(error).splitlines()[0]})."
        ) from error
