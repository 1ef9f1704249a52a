"""Backend: what a library or compiler has to offer to take part in placement.

A backend turns a Segment into a function of tensors. It is asked in this order:

    missing()            once: can it be used on this machine?
    patterns(), rules()  which subgraphs does it run as one?
    supports(segment)    for each found subgraph: may it try? (by table, quick)
    lower(segment)       the backend's own form of it
    compile(lowered)     the function
    verify(...)          does the function give what ATen gives?

`supports` may claim too much: what cannot be lowered or compiled counts as unsupported, what gives
wrong values as wrong, and neither is ever placed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch

from placement.patterns.language import Pattern
from placement.patterns.rules import PatternRule
from placement.segments import Segment

Run = Callable[..., tuple[torch.Tensor, ...]]
"""A compiled segment: takes its inputs as tensors, in order, and returns the tuple of its outputs.

Each call returns tensors that no later call writes to. It writes to none of its inputs.
"""


class Tunings(Protocol):
    """Where results of tuning survive the process."""

    def tuned(self, name: str) -> bytes | None:
        """What was kept under a name."""

    def keep_tuned(self, name: str, record: bytes) -> None:
        """Keeps something under a name, which must hold all that it depends on."""


class Backend(ABC):
    """Subclass it, set `name`, and write `lower` and `compile`; the rest has defaults."""

    name: ClassVar[str] = ""
    """How users and the cost log call it."""
    level: ClassVar[Literal["op", "graph"]] = "op"
    """`graph`: it optimizes across operations, so that adjacent segments of it are worth merging."""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """Types of the devices that it runs on."""
    isolate: ClassVar[bool] = True
    """Whether to try each segment in a child process first, which survives its crash or hang."""
    automatic: ClassVar[bool] = True
    """Whether it takes part when the user names no backends."""
    reference: ClassVar[bool] = False
    """Whether it is what the others are verified against; there is one such backend, `aten`."""
    tolerance: ClassVar[float] = 1e-4
    """How far an output may be from ATen's, relative to the largest magnitude in ATen's output."""

    def attach(self, tunings: Tunings) -> None:
        """Gives it the cost log, for what its tuning finds; it is asked before anything is compiled."""
        return

    def missing(self) -> str | None:
        """Why it cannot be used on this machine; None if it can."""
        return None

    def patterns(self) -> Sequence[Pattern]:
        """The patterns that it runs as one."""
        return ()

    def rules(self) -> Sequence[PatternRule]:
        """The rules for what it runs as one."""
        return ()

    def supports(self, segment: Segment) -> str | None:
        """Why it will not run a segment; None if it may try. Must be quick."""
        return None

    @abstractmethod
    def lower(self, segment: Segment) -> Any:
        """The segment in the backend's own form.

        Raises:
            Unsupported: if it has none.
        """

    @abstractmethod
    def compile(self, lowered: Any, segment: Segment) -> Run:
        """The function that runs a lowered segment.

        Raises:
            Unsupported: if it cannot be compiled.
        """

    def verify(self, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
        """What is wrong with a segment's outputs, given ATen's; None if nothing is."""
        if len(outputs) != len(expected):
            return f"it returned {len(outputs)} tensors instead of {len(expected)}"
        for position, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
            wrong = difference(got, wanted, self.tolerance)
            if wrong:
                return f"output {position}: {wrong}"
        return None

    def version_key(self) -> str:
        """What changes when its costs may change: its version, and settings that matter."""
        return torch.__version__

    def overhead(self) -> float | None:
        """Seconds that entering and leaving it costs on top of a segment's own cost; None: measure it."""
        return None


def difference(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str | None:
    """How a tensor differs from what was wanted; None if it does not by more than a relative tolerance."""
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__} instead of a tensor"
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if got.dtype != wanted.dtype:
        return f"{got.dtype} instead of {wanted.dtype}"
    if got.device != wanted.device:
        return f"on {got.device} instead of {wanted.device}"
    if not wanted.numel():
        return None
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        count = int((got != wanted).sum())
        return f"{count} of {wanted.numel()} elements differ" if count else None
    error = relative_error(got, wanted)
    return None if error <= tolerance else f"off by {error:.1e} of the largest magnitude"


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest finite magnitude wanted; NaN and infinity must agree."""
    got, wanted = got.detach(), wanted.detach()
    finite = torch.isfinite(wanted)
    if not torch.equal(got.isnan(), wanted.isnan()):
        return float("inf")
    infinite = wanted.isinf()
    if not torch.equal(got.isinf(), infinite) or not torch.equal(got[infinite], wanted[infinite]):
        return float("inf")
    got, wanted = got[finite].double(), wanted[finite].double()
    if not wanted.numel():
        return 0.0
    scale = max(wanted.abs().max().item(), torch.finfo(torch.float32).tiny)
    error = (got - wanted).abs().max().item() / scale
    return error if error == error else float("inf")
