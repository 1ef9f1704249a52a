"""A `Program`: where stages live, and what each rank does in which order.

In:  a `Layout` and one sequence of actions a rank, from a schedule or from text.
Out: the structure that passes rewrite, and that validator, simulator and runtime read.

Data between stages is counted in samples: micro-batch `k` of a stage with micro-batches of `size` samples
holds samples `k * size` up to `(k + 1) * size`, whatever its neighbours' sizes are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeline.actions import Action, parse_action
from pipeline.errors import ProgramError
from pipeline.graph import find_cycle


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Where and how a stage runs.

    Attributes:
        size: Samples in one of its micro-batches.
        ranks: The rank of each of its replicas.
        update: Samples whose gradients one update of its weights takes in, over all replicas.
    """

    size: int
    ranks: tuple[int, ...]
    update: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages, the edges between them, and how many samples flow through.

    Micro-batch `k` of a stage runs on its replica `k % replicas`. The derived fields are there for speed.

    Attributes:
        stages: The stages.
        edges: Pairs of stages along which activations flow; gradients flow back along them.
        samples: Samples that the program processes; a multiple of every stage's micro-batch size.
    """

    stages: tuple[StageLayout, ...]
    edges: tuple[tuple[int, int], ...]
    samples: int
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_layout(self)
        stages = range(len(self.stages))
        before = tuple(tuple(a for a, b in self.edges if b == s) for s in stages)
        after = tuple(tuple(b for a, b in self.edges if a == s) for s in stages)
        object.__setattr__(self, "predecessors", before)
        object.__setattr__(self, "successors", after)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)

    def micro_batches(self, stage: int) -> int:
        """How many micro-batches a stage runs, over all of its replicas."""
        return self.samples // self.stages[stage].size

    def owner(self, stage: int, micro_batch: int) -> int:
        """The rank that runs a micro-batch of a stage."""
        ranks = self.stages[stage].ranks
        return ranks[micro_batch % len(ranks)]

    def overlapping(self, stage: int, micro_batch: int, other: int) -> range:
        """The micro-batches of another stage that share samples with a micro-batch of this one."""
        size, other_size = self.stages[stage].size, self.stages[other].size
        return range(micro_batch * size // other_size, -(-(micro_batch + 1) * size // other_size))

    def shared_samples(self, stage: int, micro_batch: int, other: int, other_micro_batch: int) -> range:
        """The samples that a micro-batch of one stage and one of another have in common."""
        size, other_size = self.stages[stage].size, self.stages[other].size
        return range(
            max(micro_batch * size, other_micro_batch * other_size),
            min((micro_batch + 1) * size, (other_micro_batch + 1) * other_size),
        )

    def hosted(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return tuple(s for s, stage in enumerate(self.stages) if rank in stage.ranks)

    def owned(self, stage: int, rank: int) -> range:
        """The micro-batches of a stage that run on one of its ranks."""
        ranks = self.stages[stage].ranks
        return range(ranks.index(rank), self.micro_batches(stage), len(ranks))


@dataclass(frozen=True, slots=True)
class Program:
    """A layout and the actions of each rank, in order."""

    layout: Layout
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.ranks:
            raise ProgramError(f"actions for {len(self.ranks)} ranks; the layout has {self.layout.ranks}.")

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"


def chain(micro_batches: int, replicas: Sequence[int], *, sizes: Sequence[int] | None = None) -> Layout:
    """Stages that follow each other, each on ranks of its own, with one update at the end.

    Ranks are numbered stage after stage.

    Args:
        micro_batches: Micro-batches of the first stage, over all of its replicas.
        replicas: Replicas of each stage.
        sizes: Samples in a micro-batch of each stage; 1 each when left out.
    """
    sizes = [1] * len(replicas) if sizes is None else sizes
    if len(sizes) != len(replicas):
        raise ProgramError(f"{len(sizes)} micro-batch sizes for {len(replicas)} stages.")
    samples = micro_batches * (sizes[0] if sizes else 1)
    stages, first = [], 0
    for size, count in zip(sizes, replicas, strict=True):
        stages.append(StageLayout(size, tuple(range(first, first + count)), samples))
        first += count
    edges = tuple((s, s + 1) for s in range(len(stages) - 1))
    return Layout(tuple(stages), edges, samples)


def with_updates(layout: Layout, rounds: int) -> Layout:
    """The layout with an update after every `rounds` micro-batches of each replica."""
    stages = tuple(replace(s, update=rounds * s.size * len(s.ranks)) for s in layout.stages)
    return Layout(stages, layout.edges, layout.samples)


_HEADER = re.compile(r"samples ([0-9]+)")
_STAGE = re.compile(r"stage ([0-9]+) size ([0-9]+) update ([0-9]+) ranks ([0-9]+(?: [0-9]+)*)")
_EDGE = re.compile(r"edge ([0-9]+) ([0-9]+)")
_RANK = re.compile(r"rank ([0-9]+)")


def parse_program(text: str) -> Program:
    """The program that a text says; printing it gives the text back.

    Raises:
        ProgramError: With the line at fault.
    """
    samples: int | None = None
    stages: list[StageLayout] = []
    edges: list[tuple[int, int]] = []
    ranks: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.startswith("  ") and ranks:
                ranks[-1].append(parse_action(line[2:]))
            elif number == 1 and (match := _HEADER.fullmatch(line)):
                samples = int(match[1])
            elif (match := _STAGE.fullmatch(line)) and int(match[1]) == len(stages) and not edges:
                stages.append(StageLayout(int(match[2]), tuple(map(int, match[4].split())), int(match[3])))
            elif (match := _EDGE.fullmatch(line)) and not ranks:
                edges.append((int(match[1]), int(match[2])))
            elif (match := _RANK.fullmatch(line)) and int(match[1]) == len(ranks):
                ranks.append([])
            else:
                raise ProgramError(
                    f"{line!r} is not expected here; first `samples`, then `stage`s and `edge`s and"
                    " then each `rank` with its actions indented by two spaces."
                )
        except ProgramError as error:
            raise ProgramError(f"line {number}: {error}") from None
    if samples is None:
        raise ProgramError("line 1: a program starts with `samples N`.")
    layout = Layout(tuple(stages), tuple(edges), samples)
    return Program(layout, tuple(map(tuple, ranks)))


def _lines(program: Program) -> Iterator[str]:
    layout = program.layout
    yield f"samples {layout.samples}"
    for s, stage in enumerate(layout.stages):
        yield f"stage {s} size {stage.size} update {stage.update} ranks {' '.join(map(str, stage.ranks))}"
    for a, b in layout.edges:
        yield f"edge {a} {b}"
    for r, actions in enumerate(program.ranks):
        yield f"rank {r}"
        yield from (f"  {action}" for action in actions)


def _check_layout(layout: Layout) -> None:
    if not layout.stages:
        raise ProgramError("a layout needs at least one stage.")
    if layout.samples < 1:
        raise ProgramError(f"a layout has {layout.samples} samples; at least 1 is needed.")
    for s, stage in enumerate(layout.stages):
        if stage.size < 1 or layout.samples % stage.size:
            raise ProgramError(
                f"stage {s}: micro-batches of {stage.size} do not divide {layout.samples} samples."
            )
        if stage.update < 1 or stage.update % stage.size or layout.samples % stage.update:
            raise ProgramError(
                f"stage {s}: an update takes in {stage.update} samples; that must be a whole number of"
                f" micro-batches of {stage.size} and divide {layout.samples}."
            )
        if not stage.ranks or len(set(stage.ranks)) != len(stage.ranks):
            raise ProgramError(f"stage {s}: ranks {stage.ranks} must be different and at least one.")
    hosting = {rank for stage in layout.stages for rank in stage.ranks}
    if hosting != set(range(max(hosting) + 1)):
        raise ProgramError(f"ranks {sorted(hosting)} are not numbered from 0 without gaps.")
    if len(set(layout.edges)) != len(layout.edges):
        raise ProgramError("an edge appears twice.")
    for edge in layout.edges:
        if not all(0 <= end < len(layout.stages) for end in edge):
            raise ProgramError(f"edge {edge} joins a stage that does not exist.")
    if cycle := find_cycle(layout.edges):
        raise ProgramError(f"the stages form a cycle: {' -> '.join(map(str, cycle))}.")


def with_ranks(program: Program, ranks: Iterable[Iterable[Action]]) -> Program:
    """The same layout with other actions."""
    return Program(program.layout, tuple(map(tuple, ranks)))
