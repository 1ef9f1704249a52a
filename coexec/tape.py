"""GradientTape: one iteration of a program, traced or co-executed.

In:  a `with` block around one training step.
Out: the step's effects, equal to eager's.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch

from coexec import interrupts
from coexec.errors import TapeError
from coexec.options import options
from coexec.profile.profile import Profile, active_profile
from coexec.programs import state_of
from coexec.runners.pending import settle_all
from coexec.sessions import begin, may_run_ahead
from coexec.sessions.session import Session

_active = threading.local()


class GradientTape:
    """Runs the block of its `with` statement, one iteration of a program, by co-execution.

    The first iterations run eagerly and are recorded; later ones run as a Python skeleton beside
    the compiled graph of the whole iteration. Results, side effects, exceptions and random numbers
    are those of eager PyTorch.

    A program is known by the place of its `with` statement in the source.

    Args:
        key: tells apart several uses of one place (different models trained by one function).
        executor: see `coexec.Options.executor`; None takes the default from `coexec.options`.
        mode: see `coexec.Options.mode`.
        synchronous: see `coexec.Options.synchronous`.
        check: see `coexec.Options.check`.

    Raises:
        OptionError: if an option has a value that it cannot have.

    Source: Terra's `TerraGradientTape` (section 3.3.1), for PyTorch.
    """

    def __init__(
        self,
        *,
        key: object = None,
        executor: str | None = None,
        mode: str | None = None,
        synchronous: bool | None = None,
        check: bool | None = None,
    ) -> None:
        self._options = options.replaced(executor=executor, mode=mode, synchronous=synchronous, check=check)
        self._key = key
        self._session: Session | None = None
        self._profiled: Callable[[str], None] | None = None
        self._handlers: interrupts.Handlers = ()
        self._entered = False

    def __enter__(self) -> GradientTape:
        if self._entered:
            raise TapeError("this tape is in use; make a new GradientTape for each iteration")
        handlers = interrupts.put_off()
        try:
            self._enter(sys._getframe(1))
        except BaseException:
            interrupts.as_before(handlers)
            raise
        self._handlers = handlers
        return self

    def _enter(self, frame: FrameType) -> None:
        if getattr(_active, "depth", 0) or self._options.mode == "eager":
            settle_all()
        else:
            state = state_of(frame, self._key, self._options)
            profile = active_profile()
            settle_all(but=state.pending if may_run_ahead(state, self._options) else None)
            self._profiled = None if profile is None else profile.begin(state)
            self._session = begin(state, frame, self._options)
        self._entered = True
        _active.depth = getattr(_active, "depth", 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _active.depth -= 1
        self._entered = False
        session, self._session = self._session, None
        profiled, self._profiled = self._profiled, None
        handlers, self._handlers = self._handlers, ()
        try:
            if session is not None:
                session.end(error)
        finally:
            if profiled is not None:
                profiled("eager" if session is None else session.phase)
            interrupts.as_before(handlers)

    @staticmethod
    def profile(folder: str | os.PathLike[str] | None = None) -> Profile:
        """Records when both runners compute and when they wait, in the iterations of a `with` block.

            with coexec.GradientTape.profile("timeline"):
                for x, y in itertools.islice(loader, 3):
                    with coexec.GradientTape():
                        ...

        Args:
            folder: where `timeline.json` (Chrome trace events; open it in ui.perfetto.dev) and
                `timeline.png` are written at the end; None writes nothing.

        Returns:
            A context manager. After its end, its `timeline` has the same, `timeline.summary()` the
            medians, and `save(folder)` writes the files.

        Raises:
            TapeError: if an iteration is running: a profile goes around iterations.

        Source: the four kinds of time are those of Terra, figure 3.11.
        """
        if getattr(_active, "depth", 0):
            raise TapeError("profile() goes around iterations, not into one")
        return Profile(folder)

    def gradient(
        self,
        target: torch.Tensor | Sequence[torch.Tensor],
        sources: Any,
        output_gradients: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Gradients of the sum of `target` with respect to `sources`.

        Args:
            target: a tensor or several; each a scalar, unless `output_gradients` is given.
            sources: a tensor, or lists, tuples and dicts of tensors.
            output_gradients: gradients with respect to each target, of its shape.

        Returns:
            A gradient for each source, in the structure of `sources`; None where the target does
            not depend on the source.

        Raises:
            TapeError: if the tape's block is not running.
        """
        if not self._entered:
            raise TapeError("gradient() works inside of the tape's with block")
        leaves, structure = torch.utils._pytree.tree_flatten(sources)
        grads = torch.autograd.grad(target, leaves, output_gradients, allow_unused=True)
        return torch.utils._pytree.tree_unflatten(list(grads), structure)
