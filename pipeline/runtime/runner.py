"""Executes the program of one rank.

In:  a `Program`, the modules of this rank's stages, and data.
Out: losses, updated modules, and the bytes held at each action.

Each action is a method; what it gives back is done once the action is over, so that the bytes held while it
runs can be counted as `pipeline.memory` predicts them. Whatever goes wrong is raised as a `RunError` that
names rank, index and action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.distributed as dist

from pipeline.actions import Action, Compute, Kind, Message, Transfer, Wait
from pipeline.actions import Weights as WeightsAction
from pipeline.memory import recomputed_items
from pipeline.plans import StageCost
from pipeline.program import Program
from pipeline.runtime.channels import Channels, Pending
from pipeline.runtime.combinations import refuse_impossible
from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.exchange import Exchange
from pipeline.runtime.options import Options, Outcome
from pipeline.runtime.place import this_process
from pipeline.runtime.randomness import seed_of, seeded
from pipeline.runtime.replicas import Replicas
from pipeline.runtime.specs import StageSpec, agree_on_program, agree_on_specs, costs
from pipeline.runtime.stage import StageModule, StageRunner, Tensors
from pipeline.runtime.transfers import Transfers
from pipeline.runtime.weights import Weights
from pipeline.validator import validate

Release = Callable[[], None]


class Runner:
    """One rank of a pipeline: a context manager; `run` runs its program once, as often as it is called."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, StageModule],
        *,
        options: Options | None = None,
        device: torch.device | None = None,
        observer: Callable[[int, Action], None] | None = None,
    ) -> None:
        """Get ready; every rank does this at the same time, after `init_process_group`.

        Args:
            program: The same on every rank.
            stages: The stages of this rank, by number.
            options: How to run.
            device: Where to compute; the CPU when left out.
            observer: Called before each action, with its index.

        Raises:
            ValidationError: The program would go wrong.
            RunError: Ranks or stages don't fit the program.
        """
        options = Options() if options is None else options
        self.program, self.options = program, options
        self.layout = program.layout
        place = this_process(options.members)
        self.place, self.rank = place, place.rank
        self.device = torch.device("cpu") if device is None else device
        self.observer = observer
        self.runs = 0
        self.specs: tuple[StageSpec, ...] = ()
        self._fits(stages)
        refuse_impossible(program.ranks[self.rank], stages)
        if options.check:
            validate(program)
        agree_on_program(program)
        matching = options.matching or ("tags" if dist.get_backend() == "gloo" else "fifo")
        channels = Channels(program, place, matching=matching, limit_s=options.limit_s)
        self._replicas = Replicas(self.layout, place, options.limit_s)
        self.stages = {
            s: StageRunner(
                Weights(stage.module, stage.optimizer, options.limit_s), partial(self._random, s), self.device
            )
            for s, stage in stages.items()
        }
        self._actions = program.ranks[self.rank]
        self._again = recomputed_items(program)
        self._last_use = {
            (a.stage, a.version): i for i, a in enumerate(self._actions) if isinstance(a, Compute)
        }
        self._exchange = Exchange(program, self.rank, channels, self.device)
        self._transfers = Transfers(channels, self.stages, self._again, self.device)
        self._handlers: dict[type, Callable[[int, Action], Release | None]] = {
            Compute: self._compute,
            Message: self._message,
            Transfer: self._transfer,
            WeightsAction: self._weights,
            Wait: self._wait,
        }

    @property
    def costs(self) -> tuple[StageCost, ...]:
        """Bytes of each stage, as measured before the first run."""
        return costs(self.layout, self.specs)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.close()

    def prepare(self, data: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Agree with all ranks on shapes, if that hasn't been done; `run` does this by itself."""
        self._data = {s: tuple(tensors) for s, tensors in data.items() if s in self.stages}
        for s, tensors in self._data.items():
            if any(t.shape[0] != self.layout.samples for t in tensors):
                raise RunError(f"stage {s}: data must have the {self.layout.samples} samples of the program.")
        if not self.specs:
            first = {s: self._data_of(s, self.layout.owned(s, self.rank)[0]) for s in self._data}
            self.specs = agree_on_specs(self.layout, self.place, self.stages, first)

    def run(self, data: Mapping[int, Sequence[torch.Tensor]]) -> Outcome:
        """Run the program once.

        Args:
            data: For stages that read more than activations, tensors of all samples of the program.

        Raises:
            RunError: Something went wrong here or at another rank.
        """
        self.prepare(data)
        self._exchange.begin(self.specs)
        self._transfers.begin(self.specs)
        self._pending: dict[Message | Transfer, Pending] = {}
        self._losses: dict[tuple[int, int], torch.Tensor] = {}
        for stage in self.stages.values():
            stage.weights.restart()
        trace = []
        for i, action in enumerate(self._actions):
            with self._naming(i, str(action)):
                trace.append(self._step(i, action))
        with self._naming(len(self._actions), "waiting for what was sent"):
            self._exchange.finish()
        self.runs += 1
        return Outcome(self._losses, (*trace, self.held_bytes))

    def _step(self, i: int, action: Action) -> int:
        """Do one action; the bytes held while it ran."""
        if self.observer is not None:
            self.observer(i, action)
        self._exchange.check()
        before = self.held_bytes
        release = self._handlers[type(action)](i, action)
        held = max(before, self.held_bytes)
        if release is not None:
            release()
        return held

    def _compute(self, i: int, action: Action) -> Release | None:
        assert isinstance(action, Compute)
        stage, k = self.stages[action.stage], action.micro_batch
        used: list[Message] = []
        if action.kind is Kind.FORWARD:
            inputs, used = self._exchange.inputs(action)
            again = (action.stage, k) in self._again
            outputs = stage.forward(k, inputs, self._data_of(action.stage, k), action.version, again=again)
            self._check_outputs(action, outputs)
            self._exchange.put(action, outputs)
            if not self.layout.successors[action.stage]:
                self._losses[action.stage, k] = outputs[0]
        elif action.kind is Kind.RECOMPUTE:
            stage.recompute(k)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            stage.backward_weight(k)
        else:
            given, used = self._gradients(action)
            backward = stage.backward if action.kind is Kind.BACKWARD else stage.backward_input
            self._exchange.put(action, backward(k, given))
        over = self._last_use[action.stage, action.version] == i
        return partial(self._computed, used, action if over else None)

    def _computed(self, used: Sequence[Message], last: Compute | None) -> None:
        self._exchange.drop(used)
        if last is not None:
            self.stages[last.stage].weights.drop(last.version)

    def _gradients(self, action: Compute) -> tuple[Tensors, list[Message]]:
        """The gradients that a backward pass starts from."""
        if self.layout.successors[action.stage]:
            return self._exchange.gradients(action)
        place = self.layout.stages[action.stage]
        loss = self._losses[action.stage, action.micro_batch]
        return (torch.full_like(loss, place.size / place.update),), []

    def _message(self, i: int, action: Action) -> None:
        assert isinstance(action, Message)
        pending = self._exchange.start(action)
        if pending is not None:
            self._pending[action] = pending

    def _transfer(self, i: int, action: Action) -> None:
        assert isinstance(action, Transfer)
        self._pending[action] = self._transfers.start(action)

    def _wait(self, i: int, action: Action) -> Release | None:
        assert isinstance(action, Wait)
        self._pending.pop(action.on).wait()
        return self._transfers.complete(action.on) if isinstance(action.on, Transfer) else None

    def _weights(self, i: int, action: Action) -> None:
        assert isinstance(action, WeightsAction)
        weights = self.stages[action.stage].weights
        if action.kind is Kind.STASH:
            weights.stash()
        elif action.kind is Kind.REDUCE:
            self._replicas.reduce(action.stage, weights.parameters)
        else:
            weights.update(self._scale(action.stage))

    def _data_of(self, stage: int, k: int) -> Tensors:
        size = self.layout.stages[stage].size
        return tuple(t[k * size : (k + 1) * size] for t in self._data.get(stage, ()))

    def _scale(self, stage: int) -> float:
        """What makes a gradient the mean over the samples of an update; losses are weighted by theirs."""
        sinks = {
            s.update for s, after in zip(self.layout.stages, self.layout.successors, strict=True) if not after
        }
        return max(sinks) / self.layout.stages[stage].update

    def _check_outputs(self, action: Compute, outputs: Tensors) -> None:
        size = self.layout.stages[action.stage].size
        expected = [((size, *t.sample), t.dtype) for t in self.specs[action.stage].outputs]
        here = [(tuple(t.shape), t.dtype) for t in outputs]
        if expected and here != expected:
            raise RunError(
                f"the stage gave {here}, and {expected} when it was tried; shapes must not change."
            )

    @property
    def held_bytes(self) -> int:
        """Bytes held now: weights, what is saved for backward, received and not yet used, held for others."""
        stages = sum(stage.nbytes + stage.weights.nbytes for stage in self.stages.values())
        return stages + self._exchange.nbytes + self._transfers.nbytes

    def _random(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        return seeded(seed_of(self.options.seed, self.runs, stage, micro_batch), self.device)

    def _fits(self, stages: Mapping[int, StageModule]) -> None:
        processes, each = dist.get_world_size(), self.options.members
        if processes != self.layout.ranks * each:
            more = f" of {each} processes" if each > 1 else ""
            raise RunError(f"{processes} processes for a program of {self.layout.ranks} ranks{more}.")
        hosted = self.layout.hosted(self.rank)
        if sorted(stages) != list(hosted):
            raise RunError(
                f"rank {self.rank} was given stages {sorted(stages)}; its program has {list(hosted)}."
            )

    @contextmanager
    def _naming(self, i: int, what: str) -> Iterator[None]:
        """Errors inside name rank, index and action."""
        try:
            yield
        except InPlaceError as error:
            raise InPlaceError(f"rank {self.rank}, index {i} ({what}): {error}") from error
        except Exception as error:
            raise RunError(f"rank {self.rank}, index {i} ({what}): {error}") from error
