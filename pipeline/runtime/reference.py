"""The same training in one process, without a pipeline: what a run has to equal.

In:  a program, of which only the layout and the weight version of each forward pass are read, and all stages.
Out: losses, and updated modules.

Versions are copies in a list, micro-batches go through all stages one after the other, gradients are added in
that order. Nothing of the runner is used, except that random numbers come from the same seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.func import functional_call

from pipeline.actions import Compute, Kind
from pipeline.program import Program
from pipeline.runtime.errors import RunError
from pipeline.runtime.randomness import seed_of, seeded
from pipeline.runtime.stage import StageModule
from pipeline.schedules.synchronous import topological

Weights = dict[str, torch.Tensor]


def run_in_one_process(
    program: Program,
    stages: Sequence[StageModule],
    data: Mapping[int, Sequence[torch.Tensor]],
    *,
    seed: int = 0,
    run: int = 0,
) -> dict[tuple[int, int], torch.Tensor]:
    """Losses by stage and micro-batch; the modules are trained.

    Args:
        program: What says which version of the weights each micro-batch sees, and when updates are.
        stages: All stages.
        data: For stages that read more than activations, tensors of all samples of the program.
        seed: As `Options.seed`.
        run: How many runs have been before.

    Raises:
        RunError: Stages use different micro-batch sizes and update more than once.
    """
    layout = program.layout
    reference = _Reference(program, stages, data, seed, run)
    if len({stage.size for stage in layout.stages}) == 1:
        for k in range(layout.micro_batches(0)):
            reference.train({s: range(k, k + 1) for s in range(len(stages))})
    elif all(stage.update == layout.samples for stage in layout.stages):
        reference.train({s: range(layout.micro_batches(s)) for s in range(len(stages))})
    else:
        raise RunError("with different micro-batch sizes, the reference makes one update, at the end.")
    return reference.losses


class _Reference:
    """Weights, gradients and losses so far."""

    def __init__(
        self,
        program: Program,
        stages: Sequence[StageModule],
        data: Mapping[int, Sequence[torch.Tensor]],
        seed: int,
        run: int,
    ) -> None:
        self.layout, self.stages, self.data = program.layout, stages, data
        self.seed, self.run = seed, run
        self.used = {
            (a.stage, a.micro_batch): a.version
            for actions in program.ranks
            for a in actions
            if isinstance(a, Compute) and a.kind is Kind.FORWARD
        }
        self.versions = [[_copy(stage)] for stage in stages]
        self.gradients: list[Weights] = [{} for _ in stages]
        self.done = [0] * len(stages)
        self.losses: dict[tuple[int, int], torch.Tensor] = {}

    def train(self, micro_batches: Mapping[int, range]) -> None:
        """Run these micro-batches of each stage forward and backward, and make the updates that are due."""
        made: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        for s in topological(self.layout):
            for k in micro_batches[s]:
                made[s, k] = self._forward(s, k, made)
        sinks = [s for s, after in enumerate(self.layout.successors) if not after]
        losses = {(s, k): made[s, k][0] for s in sinks for k in micro_batches[s]}
        self.losses |= {key: loss.detach() for key, loss in losses.items()}
        weighted = [loss * self._weight(s) for (s, _), loss in losses.items()]
        used = {(s, self.used[s, k]) for s, ks in micro_batches.items() for k in ks}
        leaves = [(s, name, p) for s, v in sorted(used) for name, p in self.versions[s][v].items()]
        learning = [leaf for leaf in leaves if leaf[2].requires_grad]
        found = torch.autograd.grad(weighted, [p for _, _, p in learning], allow_unused=True)
        for (s, name, _), g in zip(learning, found, strict=True):
            if g is not None:
                before = self.gradients[s].get(name)
                self.gradients[s][name] = g if before is None else before + g
        for s, ks in micro_batches.items():
            self.done[s] += len(ks) * self.layout.stages[s].size
            if self.done[s] % self.layout.stages[s].update == 0:
                self._update(s)

    def _forward(
        self, s: int, k: int, made: Mapping[tuple[int, int], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        size = self.layout.stages[s].size
        inputs: list[torch.Tensor] = []
        for p in self.layout.predecessors[s]:
            first = self.layout.stages[p].size
            parts = []
            for j in self.layout.overlapping(s, k, p):
                samples = self.layout.shared_samples(s, k, p, j)
                parts.append([t[samples.start - j * first : samples.stop - j * first] for t in made[p, j]])
            inputs += [torch.cat(same) if len(same) > 1 else same[0] for same in zip(*parts, strict=True)]
        data = [t[k * size : (k + 1) * size] for t in self.data.get(s, ())]
        weights = self.versions[s][self.used[s, k]]
        with seeded(seed_of(self.seed, self.run, s, k)):
            output = functional_call(self.stages[s].module, weights, (*inputs, *data))
        return output if isinstance(output, tuple) else (output,)

    def _weight(self, sink: int) -> float:
        place = self.layout.stages[sink]
        return place.size / place.update

    def _update(self, s: int) -> None:
        sinks = [t for t, after in enumerate(self.layout.successors) if not after]
        scale = self.layout.stages[sinks[0]].update / self.layout.stages[s].update
        for name, p in self.stages[s].module.named_parameters():
            g = self.gradients[s].get(name)
            p.grad = g if g is None or scale == 1.0 else g * scale
        optimizer = self.stages[s].optimizer
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        self.gradients[s] = {}
        self.versions[s].append(_copy(self.stages[s]))


def _copy(stage: StageModule) -> Weights:
    return {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in stage.module.named_parameters()
    }
