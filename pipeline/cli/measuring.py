"""What the parts of a job cost on this machine, each alone in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from pipeline.graph import Cost, ProfiledGraph, chain_graph
from pipeline.plans import StageCost
from pipeline.runtime.job import Job, data_of, program_of, stage_modules
from pipeline.runtime.measure import measure
from pipeline.trainable import make_trainable


@contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks compute; the number of threads also decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured_costs(job: Job) -> tuple[StageCost, ...]:
    """What the stages of a job cost."""
    with one_thread():
        trainable = make_trainable(job.model, job.seed, **job.options)
        program = program_of(job, len(trainable.layers))
        modules = stage_modules(job, trainable, range(len(program.layout.stages)))
        data = data_of(job, trainable, program, 0)
        return measure(program.layout, [modules[s] for s in sorted(modules)], data)


def measured_profile(job: Job) -> ProfiledGraph:
    """What the layers of a job's model cost, for as many samples as a micro-batch has; each is a node."""
    layers = len(make_trainable(job.model, job.seed, **job.options).layers)
    alone = replace(job, ranks=layers, schedule="gpipe", micro_batches=1, lengths=(1,) * layers)
    costs = {
        f"layer{i}": Cost(
            1e3 * cost.forward_s,
            1e3 * cost.backward_s,
            cost.output_bytes,
            cost.parameter_bytes,
            cost.saved_bytes,
        )
        for i, cost in enumerate(measured_costs(alone))
    }
    return chain_graph(job.model, costs, samples=job.samples)
