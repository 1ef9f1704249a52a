"""What the processes of a `Pool` run: functions of the rank and what the test passes."""

from __future__ import annotations

from typing import Any

from pipeline.program import parse_program
from pipeline.runtime import Options, Runner
from tests.pipeline.runtime.models import make_data, make_stage

LIMIT = Options(limit_s=20.0)


def train(rank: int, text: str, runs: int, options: Options = LIMIT) -> dict[str, Any]:
    """Losses, weights and held bytes of this rank after some runs of a program."""
    return train_with(rank, text, runs, {}, options)


def train_with(
    rank: int, text: str, runs: int, model: dict[str, Any], options: Options = LIMIT
) -> dict[str, Any]:
    """As `train`, with options of the stages."""
    program = parse_program(text)
    layout = program.layout
    stages = {s: make_stage(layout, s, **model) for s in layout.hosted(rank)}
    runner = Runner(program, stages, options=options)
    losses, held = [], []
    for run in range(runs):
        outcome = runner.run(make_data(layout, run))
        losses.append({key: loss.item() for key, loss in outcome.losses.items()})
        held.append(outcome.held_bytes)
    runner.close()
    weights = {
        s: {n: p.detach().numpy() for n, p in stage.module.named_parameters()} for s, stage in stages.items()
    }
    return {"losses": losses, "weights": weights, "held": held, "costs": runner.costs}
