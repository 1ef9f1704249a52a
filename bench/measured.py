"""A run together with what was measured of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bench.modes import Run
from bench.program import Preset
from bench.records import Result, resident_mb
from bench.state import Difference, tolerance_of

if TYPE_CHECKING:
    from coexec import ProgramReport


@dataclass(slots=True)
class Measured:
    """A run and its samples."""

    run: Run
    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_rss_mb: float = 0.0

    def step(self) -> torch.Tensor:
        """Take one timed step of the run that is active, end the epoch if it was the last, return the loss.

        What happens between epochs is not part of a step's time.
        """
        run = self.run
        start = time.perf_counter()
        loss = run.training.step(run.tape)
        self.step_ms.append((time.perf_counter() - start) * 1e3)
        run.steps += 1
        run.finish_epoch_if_due()
        self.peak_rss_mb = max(self.peak_rss_mb, resident_mb())
        return loss

    def result(
        self, seed: int, preset: Preset, difference: Difference | None = None, **details: Any
    ) -> Result:
        """Return what goes into the record."""
        run = self.run
        explained = explain_run(run)
        return Result(
            program=run.program.name,
            mode=run.mode,
            executor=run.executor,
            step_ms=tuple(self.step_ms),
            first_call_s=self.step_ms[0] / 1e3,
            equal=difference.equal if difference else None,
            max_abs_diff=difference.max_abs if difference else None,
            traces=explained.traces if explained else None,
            fallbacks=explained.fallbacks if explained else None,
            coexec_share=explained.coexec_share if explained else None,
            peak_rss_mb=self.peak_rss_mb,
            details={
                "seed": seed,
                "preset": preset,
                "tolerance": tolerance_of(run) if difference else None,
                "first_difference": difference.first if difference else None,
                "losses": self.losses or [loss for _, loss in run.training.logged],
                "metric": run.program.metric,
                "metrics": run.metrics,
                **details,
            },
        )


def explain_run(run: Run) -> ProgramReport | None:
    """Return what coexec says of a run, or None in the modes that don't use it."""
    if run.executor is None:
        return None
    import coexec

    return next(program for program in coexec.explain().programs if program.key.endswith(f"[{run.key}]"))
