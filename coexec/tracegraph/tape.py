"""How autograd goes back through an event, and what a backward pass did there.

Autograd runs the nodes of its graph from the latest to the first one, so a backward pass goes through the
events of an iteration in the opposite order. What the nodes of one event do depends on that event and on the
gradients that reach it, and on nothing else that came before: as an event of its own, a *piece* of a backward
pass is the same on all paths that lead there. See `coexec.tracegraph.in_pieces`.

In:  the autograd graph of an event, as the tracer saw it.
Out: `Tape`, what a running iteration has to know of it; `Passage`, what a backward pass did; `Piece`, what an
     event that is a piece of a backward pass stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from coexec.tracegraph.trace import TensorMeta, Value

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Tape:
    """How autograd goes back through an event.

    Gradients come in at *entries*: a node and the number of one of its results.

    Attributes:
        entries: of each output its entry; None for an output without history.
        leads: of each entry, the arguments of the event whose gradients may get something from there.
    """

    entries: tuple[int | None, ...]
    leads: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient on its way: its value in the event of the backward pass, and what it looks like."""

    value: Value
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Passage:
    """What a backward pass did with the nodes of one event, or with one leaf.

    Attributes:
        event: whose nodes; None for a leaf.
        leaf: among the inputs of the backward pass; None for an event.
        operations: of the backward pass, those that ran here.
        takes: the gradients that came in, by entry; of a leaf, by 0.
        gives: for arguments of the event, the gradient that has come together so far, and what it was before.
        adds: operations that add to what it was before, and the arguments.
    """

    event: int | None
    leaf: int | None
    operations: tuple[int, ...]
    takes: tuple[tuple[int, Gradient], ...]
    gives: tuple[tuple[int, Gradient, Gradient | None], ...] = ()
    adds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """The event that begins a backward pass in pieces: its outputs are the gradients of its tensors.

    Attributes:
        frees: whether what autograd has saved is gone afterwards.
    """

    frees: bool


@dataclass(frozen=True, slots=True)
class Passed:
    """The event that runs the nodes of event (in a graph: node) `of`.

    Its tensor arguments are the gradients at `entries`, then what is added to, then the arguments of `of`
    that autograd has saved.

    Attributes:
        of: whose nodes.
        entries: those that have a gradient.
        gives: for each output, the argument of `of` whose gradient it is, as far as it has come together.
        adds: for each output, whether there was a gradient before.
        saved: the arguments of `of` that are read.
        memory: for each output, the position of the argument whose memory it is on; `OWN` and below for
            memory that is made here; None for any other.
        at: symbols in the sizes of `of`, and the only values at which this is known to be right; in a graph
            each has its place among these symbols, for a number.
    """

    of: int
    entries: tuple[int, ...]
    gives: tuple[int, ...]
    adds: tuple[bool, ...]
    saved: tuple[int, ...]
    memory: tuple[int | None, ...]
    at: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The event that gives a leaf its gradient.

    Attributes:
        steals: whether the gradient becomes the leaf's own, and no copy of it.
    """

    steals: bool


Piece = Begun | Passed | Reached


def at_of(piece: Piece | None) -> tuple[tuple[int, int], ...]:
    """The symbols and values to which a piece is bound."""
    return piece.at if isinstance(piece, Passed) else ()


#: Memory that a piece makes itself, counted downwards.
OWN = -1


class BackwardOf:
    """The function of events that run the nodes of another function's events."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        name = getattr(function, "__name__", str(function))
        self.__name__ = self.__qualname__ = f"backward of {name}"
        self.__module__ = "torch.autograd"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BackwardOf) and other.function == self.function

    def __hash__(self) -> int:
        return hash((BackwardOf, self.function))

    def __call__(self, *arguments: Any) -> NoReturn:
        """Is not made by itself."""
        raise RuntimeError(f"{self.__name__} is an event, and no function to be called")


def accumulate_grad(gradient: Any) -> NoReturn:
    """The event that gives a leaf its gradient."""
    raise RuntimeError("accumulate_grad is an event, and no function to be called")


accumulate_grad.__module__ = "torch.autograd"  # where a reader of a TraceGraph expects it


@dataclass(frozen=True, slots=True)
class Route:
    """Which events a backward pass reaches.

    Attributes:
        events: in the order in which they are gone through.
        last: for each leaf, the event after which it gets its gradient; in the order in which they do.
    """

    events: tuple[int, ...]
    last: dict[Hashable, int]


class Unknown(Exception):
    """A backward pass reaches an event of which it is not known how to go through it."""


def route(
    tapes: Sequence[Tape | None],
    target: Callable[[int, int], tuple[int, int] | Hashable | None],
    root: tuple[int, int],
) -> Route:
    """Finds out which way a backward pass goes.

    Args:
        tapes: of the events of an iteration, in order.
        target: where the gradient of an event's argument goes to: to an event and an entry of it, as a
            `tuple`; to a leaf, as anything else; None for one that needs no gradient.
        root: the event and the entry that it begins at.

    Raises:
        Unknown: if it reaches an event without a tape.
    """
    touched: dict[int, set[int]] = {root[0]: {root[1]}}
    events: list[int] = []
    last: dict[Hashable, int] = {}
    for event in range(root[0], -1, -1):
        entries = touched.get(event)
        if entries is None:
            continue
        tape = tapes[event]
        if tape is None:
            raise Unknown
        events.append(event)
        for argument in sorted(frozenset().union(*(tape.leads[e] for e in entries))):
            to = target(event, argument)
            if isinstance(to, tuple):
                touched.setdefault(to[0], set()).add(to[1])
            elif to is not None:
                last.pop(to, None)  # leaves of one event are in the order of its arguments
                last[to] = event
    return Route(tuple(events), last)
