"""The state of random number generators, saved before an iteration and put back if it is cancelled.

In:  the program (which generators its operations name).
Out: a function that puts the states back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from coexec.tracegraph.program import Call, Program


def save(generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Saves the states of generators.

    Returns:
        A function that puts them back.
    """
    states = [(g, g.get_state()) for g in generators]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def default_generators() -> tuple[torch.Generator, ...]:
    """The generators that operations draw from that are given none."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (torch.default_generator, *cuda)


def generators_of(program: Program) -> tuple[torch.Generator, ...]:
    """The generators that a program draws from: the default ones, and those that operations were given."""
    if not program.random:
        return ()
    found = list(default_generators())
    for instruction in program.instructions:
        if isinstance(instruction, Call):
            found += [g for g in _generators(instruction.args) if not any(g is f for f in found)]
    return tuple(found)


def _generators(args: Any) -> Iterator[torch.Generator]:
    if isinstance(args, torch.Generator):
        yield args
    elif isinstance(args, tuple):
        for a in args:
            yield from _generators(a)
