"""What the processes of a `Pool` run: functions of the rank and what the test passes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.actions import Action
from pipeline.program import Layout, parse_program
from pipeline.runtime import Options, Runner, StageModule, checkpoint
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
    losses, held = [], []
    with Runner(program, stages, options=options) as runner:
        for run in range(runs):
            outcome = runner.run(make_data(layout, run))
            losses.append({key: loss.item() for key, loss in outcome.losses.items()})
            held.append(outcome.held_bytes)
    weights = {
        s: {n: p.detach().numpy() for n, p in stage.module.named_parameters()} for s, stage in stages.items()
    }
    return {"losses": losses, "weights": weights, "held": held, "costs": runner.costs}


def train_on_gpu(rank: int, text: str, runs: int, dropout: float) -> dict[str, Any]:
    """Losses and held bytes of this rank, which computes on a GPU of its own."""
    program = parse_program(text)
    layout = program.layout
    device = torch.device("cuda", rank)
    stages = {s: make_stage(layout, s, dropout=dropout) for s in layout.hosted(rank)}
    for stage in stages.values():
        stage.module.to(device)
    losses, held = [], []
    with Runner(program, stages, options=LIMIT, device=device) as runner:
        for run in range(runs):
            data = {s: [t.to(device) for t in tensors] for s, tensors in make_data(layout, run).items()}
            outcome = runner.run(data)
            losses.append({key: loss.item() for key, loss in outcome.losses.items()})
            held.append(outcome.held_bytes)
    return {"losses": losses, "held": held, "costs": runner.costs}


def fail_at(rank: int, text: str, failing: int, index: int, how: str) -> str:
    """Run a program in which one rank fails before one of its actions; what the others are told.

    `how` is raise, die or hang.
    """
    program = parse_program(text)
    layout = program.layout

    def observer(i: int, action: Action) -> None:
        if (rank, i) == (failing, index):
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(5)
            raise ValueError("a stage that fails")

    stages = {s: make_stage(layout, s) for s in layout.hosted(rank)}
    with Runner(program, stages, options=Options(limit_s=3.0), observer=observer) as runner:
        runner.run(make_data(layout))
    return "all is well"


class ChangesInPlace(nn.Module):
    """Changes what autograd has saved."""

    def forward(self, x):
        y = x.exp()
        y.add_(1)
        return y


def change_in_place(rank: int, text: str) -> None:
    """Run a program in which stage 1 changes what has been saved."""
    program = parse_program(text)
    layout = program.layout
    stages = {s: make_stage(layout, s, tokens=False) for s in layout.hosted(rank)}
    if 1 in stages:
        stages[1] = StageModule(ChangesInPlace())
    with Runner(program, stages, options=Options(limit_s=3.0)) as runner:
        runner.run(make_data(layout))


def leave_early(rank: int, text: str) -> None:
    """One rank is gone before the first action."""
    program = parse_program(text)
    layout = program.layout
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stages = {s: make_stage(layout, s) for s in layout.hosted(rank)}
    with Runner(program, stages, options=Options(limit_s=3.0)) as runner:
        runner.run(make_data(layout))


def disagree(rank: int, texts: list[str], check: bool) -> None:
    """Each rank has a program of its own."""
    program = parse_program(texts[rank])
    layout = program.layout
    stages = {s: make_stage(layout, s) for s in layout.hosted(rank)}
    with Runner(program, stages, options=Options(limit_s=3.0, check=check)) as runner:
        runner.run(make_data(layout))


class Large(nn.Module):
    """Saves 24 MB for each sample, and little else."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 1, 3000, dtype=torch.float64))
        self.last = last

    def forward(self, x):
        y = (x[..., None] * self.scale).exp().mean(-1)
        return y.mean() if self.last else y


def resident(rank: int, text: str) -> tuple[int, int]:
    """The most bytes that a rank holds in its second run, and that are resident, more than at its start."""
    program = parse_program(text)
    layout = program.layout
    stages = {s: StageModule(Large(last=not layout.successors[s])) for s in layout.hosted(rank)}
    points: list[tuple[int, int]] = []

    def observer(index: int, action: Action) -> None:
        points.append((runner.held_bytes, resident_bytes()))

    with Runner(program, stages, options=LIMIT, observer=observer) as runner:
        data = {0: [torch.linspace(-1, 1, layout.samples * 1000, dtype=torch.float64).view(-1, 1000)]}
        runner.run(data)
        points.clear()
        runner.run(data)
    held, here = (max(column) - column[0] for column in zip(*points, strict=True))
    return held, here


def resident_bytes() -> int:
    """Physical memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resumed(rank: int, text: str, directory: str, runs: int) -> dict[str, Any]:
    """Go on from the last checkpoint until so many runs are done, with a checkpoint after each."""
    program = parse_program(text)
    layout = program.layout
    stages = {s: make_stage(layout, s, optimizer="adam") for s in layout.hosted(rank)}
    losses = []
    with Runner(program, stages, options=LIMIT) as runner:
        checkpoint.resume(runner, Path(directory))
        while runner.runs < runs:
            outcome = runner.run(make_data(layout, runner.runs))
            losses.append({key: loss.item() for key, loss in outcome.losses.items()})
            checkpoint.save(runner, Path(directory))
    return {"losses": losses}


def resume_with_seed(rank: int, text: str, directory: str, seed: int) -> None:
    """Resume with another seed."""
    program = parse_program(text)
    layout = program.layout
    stages = {s: make_stage(layout, s, optimizer="adam") for s in layout.hosted(rank)}
    with Runner(program, stages, options=Options(seed=seed)) as runner:
        checkpoint.resume(runner, Path(directory))


def gradients(rank: int, text: str) -> list[Any]:
    """Gradients that a run leaves on this rank, by stage and parameter; no optimizer takes them."""
    program = parse_program(text)
    layout = program.layout
    stages = {
        s: StageModule(make_stage(layout, s, dropout=0.0, tokens=False).module) for s in layout.hosted(rank)
    }
    with Runner(program, stages, options=LIMIT) as runner:
        runner.run(make_data(layout))
    return [p.grad.numpy() for s in sorted(stages) for p in stages[s].module.parameters()]


def gradients_of_torch(rank: int, text: str, schedule: str) -> list[Any]:
    """The same from torch's own runtime."""
    from torch.distributed import pipelining  # takes a second to load

    layout = parse_program(text).layout
    stages = torch_stages(layout, rank)
    kind = getattr(pipelining, schedule)
    several = len(stages) > 1
    runner = kind(stages if several else stages[0], layout.micro_batches(0), loss_fn=cross_entropy)
    return step_of_torch(runner, layout, stages)


def gradients_of_export(rank: int, text: str, other: str | None = None) -> list[Any]:
    """The same from torch's runtime with the order of the program, or that of another one."""
    from pipeline.torch_schedule import torch_schedule  # takes a second to load

    layout = parse_program(text).layout
    stages = torch_stages(layout, rank)
    return step_of_torch(torch_schedule(parse_program(other or text), stages, cross_entropy), layout, stages)


def torch_stages(layout: Layout, rank: int) -> list[Any]:
    """The stages of a rank as torch has them, the loss apart."""
    from torch.distributed import pipelining

    last = len(layout.stages) - 1
    stages = []
    for s in layout.hosted(rank):
        module = make_stage(layout, s, dropout=0.0, tokens=False).module
        whole = nn.Sequential(module.middle, module.head) if s == last else module
        stages.append(pipelining.PipelineStage(whole, s, last + 1, torch.device("cpu")))
    return stages


def step_of_torch(schedule: Any, layout: Layout, stages: list[Any]) -> list[Any]:
    """Gradients after one batch."""
    data = make_data(layout)
    inputs = data[0] if any(stage.is_first for stage in stages) else []
    target = {"target": data[len(layout.stages) - 1][0]} if any(stage.is_last for stage in stages) else {}
    schedule.step(*inputs, **target)
    return [p.grad.numpy() for stage in stages for p in stage.submod.parameters()]


def cross_entropy(logits, targets):
    """The loss of `Last`."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sharded(rank: int, text: str, how: str) -> dict[str, Any]:
    """Losses and weights when two processes are one rank: replicas, parameters sharded, or layers split."""
    from torch.distributed.device_mesh import init_device_mesh  # these take seconds to load
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    program = parse_program(text)
    layout = program.layout
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "inner"))["inner"]
    place = rank // 2
    stages = {}
    for s in layout.hosted(place):
        module = make_stage(layout, s, dropout=0.0, tokens=False).module
        if how == "ddp":
            module = DistributedDataParallel(module, process_group=mesh.get_group())
        elif how == "fsdp":
            for child in [*module.children(), module]:
                fully_shard(child, mesh=mesh)
        else:
            middle = "middle." if s in (0, len(layout.stages) - 1) else ""
            parallelize_module(
                module,
                mesh,
                {
                    f"{middle}qkv": ColwiseParallel(output_layouts=Replicate()),
                    f"{middle}out": ColwiseParallel(output_layouts=Replicate()),
                },
            )
        stages[s] = StageModule(module, torch.optim.SGD(module.parameters(), lr=0.01))
    # Split layers: both processes have all samples. Otherwise each has samples of its own.
    data = make_data(layout, seed=0 if how == "tensor parallel" else rank % 2)
    with Runner(program, stages, options=Options(limit_s=20.0, members=2)) as runner:
        outcome = runner.run(data)
    weights = {
        s: {
            n.removeprefix("module."): p.full_tensor().detach().numpy()
            if isinstance(p, DTensor)
            else p.detach().numpy()
            for n, p in stage.module.named_parameters()
        }
        for s, stage in stages.items()
    }
    return {
        "losses": [{k: v.item() for k, v in outcome.losses.items()}],
        "weights": weights,
        "held": outcome.held_bytes,
    }
