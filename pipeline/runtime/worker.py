"""One rank of a job, as torchrun starts it: `python -m pipeline.runtime.worker DIR`.

In:  `DIR/job.json`.
Out: `DIR/rank-R.json` with losses, seconds and bytes; `DIR/rank-R.error` when something went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.errors import PipelineError
from pipeline.runtime import checkpoint
from pipeline.runtime.job import Job, data_of, job_from_json, program_of, stage_modules
from pipeline.runtime.launch import announce
from pipeline.runtime.options import Options
from pipeline.runtime.progress import Progress
from pipeline.runtime.runner import Runner
from pipeline.trainable import make_trainable


def main(directory: Path) -> int:
    """Run this rank; 0 when all is well."""
    rank = int(os.environ["RANK"])
    announce(directory, rank)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    content = json.loads((directory / "job.json").read_text(encoding="utf-8"))
    job = job_from_json(content["job"])
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=job.limit_s))
        result = train(job, rank, directory, content["checkpoints"], content["every"])
    except Exception as error:
        _write(directory / f"rank-{rank}.error", str(error))
        if isinstance(error, PipelineError):  # it says all there is to say
            return 1
        raise
    _write(directory / f"rank-{rank}.json", json.dumps(result))
    dist.destroy_process_group()
    return 0


def train(job: Job, rank: int, directory: Path, checkpoints: str | None, every: int) -> dict[str, Any]:
    """Do the rank's part of a job.

    Returns:
        The first run, losses of each one by micro-batch, seconds of each one, the most bytes held, and the
        bytes of each stage, from which their number can be predicted.
    """
    trainable = make_trainable(job.model, job.seed, **job.options)
    program = program_of(job, len(trainable.layers))
    stages = stage_modules(job, trainable, program.layout.hosted(rank))
    losses, seconds, held = [], [], 0
    progress = Progress(directory / f"rank-{rank}.progress")
    options = Options(limit_s=job.limit_s, seed=job.seed)
    with Runner(program, stages, options=options, observer=progress) as runner:
        if checkpoints is not None:
            checkpoint.resume(runner, Path(checkpoints))
        first = runner.runs
        while runner.runs < job.runs:
            data = data_of(job, trainable, program, runner.runs)
            runner.prepare(data)
            dist.barrier()
            start = time.perf_counter()
            outcome = runner.run(data)
            seconds.append(time.perf_counter() - start)
            losses.append([[k, loss.item()] for (_, k), loss in sorted(outcome.losses.items())])
            held = max(held, *outcome.held_bytes)
            if checkpoints is not None and runner.runs % every == 0:
                checkpoint.save(runner, Path(checkpoints))
        costs = [asdict(cost) for cost in runner.costs]
    return {"first": first, "losses": losses, "seconds": seconds, "held_bytes": held, "costs": costs}


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
