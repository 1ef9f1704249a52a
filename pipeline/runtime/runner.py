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
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pipeline.actions import Action, Compute, Kind, Message, Transfer, Wait
from pipeline.actions import Weights as WeightsAction
from pipeline.dependencies import Result, inputs_of
from pipeline.memory import recomputed_items
from pipeline.plans import StageCost
from pipeline.program import Program
from pipeline.runtime.channels import Channels, Pending
from pipeline.runtime.errors import InPlaceError, RunError
from pipeline.runtime.randomness import seed_of, seeded
from pipeline.runtime.replicas import Replicas
from pipeline.runtime.sends import Sends
from pipeline.runtime.specs import StageSpec, agree_on_program, agree_on_specs, costs
from pipeline.runtime.stage import StageModule, StageRunner, Tensors
from pipeline.runtime.values import Values, join
from pipeline.runtime.weights import Weights
from pipeline.validator import Matching, validate

Release = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How a program is run.

    Attributes:
        limit_s: Seconds that a rank waits for another one before it gives up.
        seed: Of all random numbers that stages draw.
        matching: How the backend matches messages; found out from it when left out.
        check: Whether to validate the program first.
    """

    limit_s: float = 60.0
    seed: int = 0
    matching: Matching | None = None
    check: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a program gives on one rank.

    Attributes:
        losses: By stage and micro-batch, those that were computed here.
        held_bytes: Bytes held while each action ran, and one more entry for the end.
    """

    losses: Mapping[tuple[int, int], torch.Tensor]
    held_bytes: tuple[int, ...]


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
        self.rank = dist.get_rank()
        self.device = torch.device("cpu") if device is None else device
        self.observer = observer
        self.runs = 0
        self.specs: tuple[StageSpec, ...] = ()
        self._fits(stages)
        if options.check:
            validate(program)
        agree_on_program(program)
        matching = options.matching or ("tags" if dist.get_backend() == "gloo" else "fifo")
        self._channels = Channels(program, self.rank, matching=matching, limit_s=options.limit_s)
        self._replicas = Replicas(self.layout, options.limit_s)
        self.stages = {
            s: StageRunner(Weights(stage.module, stage.optimizer), partial(self._random, s), self.device)
            for s, stage in stages.items()
        }
        self._actions = program.ranks[self.rank]
        self._again = recomputed_items(program)
        self._waited = {action.on for action in self._actions if isinstance(action, Wait)}
        self._last_use = {
            (a.stage, a.version): i for i, a in enumerate(self._actions) if isinstance(a, Compute)
        }
        self._received: dict[Message, Tensors] = {}
        self._accepted: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._sends = Sends()
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
        self._sends.close()

    def run(self, data: Mapping[int, Sequence[torch.Tensor]]) -> Outcome:
        """Run the program once.

        Args:
            data: For stages that read more than activations, tensors of all samples of the program.

        Raises:
            RunError: Something went wrong here or at another rank.
        """
        self._data = {s: tuple(tensors) for s, tensors in data.items() if s in self.stages}
        for s, tensors in self._data.items():
            if any(t.shape[0] != self.layout.samples for t in tensors):
                raise RunError(f"stage {s}: data must have the {self.layout.samples} samples of the program.")
        if not self.specs:
            first = {s: self._data_of(s, self.layout.owned(s, self.rank)[0]) for s in self._data}
            self.specs = agree_on_specs(self.layout, self.rank, self.stages, first)
        self._values = Values(self.layout, self.rank, self._actions)
        self._pending: dict[Message | Transfer, Pending] = {}
        self._losses: dict[tuple[int, int], torch.Tensor] = {}
        for stage in self.stages.values():
            stage.weights.restart()
        trace = []
        for i, action in enumerate(self._actions):
            with self._naming(i, str(action)):
                trace.append(self._step(i, action))
        with self._naming(len(self._actions), "waiting for what was sent"):
            self._sends.finish()
        self.runs += 1
        return Outcome(self._losses, (*trace, self.held_bytes))

    def _step(self, i: int, action: Action) -> int:
        """Do one action; the bytes held while it ran."""
        if self.observer is not None:
            self.observer(i, action)
        self._sends.check()
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
            inputs = self._inputs(action, used)
            again = (action.stage, k) in self._again
            outputs = stage.forward(k, inputs, self._data_of(action.stage, k), action.version, again=again)
            self._check_outputs(action, outputs)
            self._values.put(
                Result(False, action.stage, k), dict.fromkeys(self.layout.successors[action.stage], outputs)
            )
            if not self.layout.successors[action.stage]:
                self._losses[action.stage, k] = outputs[0]
        elif action.kind is Kind.RECOMPUTE:
            stage.recompute(k)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            stage.backward_weight(k)
        else:
            given = self._gradients(action, used)
            backward = stage.backward if action.kind is Kind.BACKWARD else stage.backward_input
            self._values.put(Result(True, action.stage, k), self._by_source(action.stage, backward(k, given)))
        over = self._last_use[action.stage, action.version] == i
        return partial(self._computed, used, action if over else None)

    def _computed(self, used: Sequence[Message], last: Compute | None) -> None:
        for message in used:
            del self._received[message]
        if last is not None:
            self.stages[last.stage].weights.drop(last.version)

    def _message(self, i: int, action: Action) -> None:
        assert isinstance(action, Message)
        if action.kind is Kind.RECEIVE:
            stage = action.target if action.gradient else action.source
            spec = self.specs[stage]
            tensors = tuple(
                t.empty(action.stop - action.start, self.device)
                for t in (spec.gradients if action.gradient else spec.outputs)
            )
            self._received[action] = tensors
            self._pending[action] = self._channels.start(action, tensors)
            return
        made = Result(action.gradient, action.source, action.start // self.layout.stages[action.source].size)
        values = self._values.take(made, action.target, action.start, action.stop)
        pending = self._channels.start(action, [t.contiguous() for t in values])
        if action in self._waited:
            self._pending[action] = pending
        else:
            self._sends.add(pending)

    def _transfer(self, i: int, action: Action) -> None:
        assert isinstance(action, Transfer)
        item = (action.stage, action.micro_batch)
        if action.kind is Kind.EVICT:
            parts = self.stages[action.stage].saved(action.micro_batch).give()
            self._check_sizes(action, parts)
        elif action.kind is Kind.RETURN:
            parts = self._accepted[item]
        else:
            parts = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in self._sizes(action)]
            self._accepted[item] = parts
        self._pending[action] = self._channels.start(action, parts)

    def _wait(self, i: int, action: Action) -> Release | None:
        assert isinstance(action, Wait)
        self._pending.pop(action.on).wait()
        if isinstance(action.on, Message):
            return None
        item = (action.on.stage, action.on.micro_batch)
        if action.on.kind is Kind.EVICT:
            return self.stages[item[0]].saved(item[1]).release
        if action.on.kind is Kind.RETURN:
            return partial(self._let_go, item)
        if action.on.kind is Kind.LOAD:
            self.stages[item[0]].saved(item[1]).take(self._accepted.pop(item))
        return None

    def _let_go(self, item: tuple[int, int]) -> None:
        del self._accepted[item]

    def _weights(self, i: int, action: Action) -> None:
        assert isinstance(action, WeightsAction)
        weights = self.stages[action.stage].weights
        if action.kind is Kind.STASH:
            weights.stash()
        elif action.kind is Kind.REDUCE:
            self._replicas.reduce(action.stage, weights.parameters)
        else:
            weights.update(self._scale(action.stage))

    def _inputs(self, action: Compute, used: list[Message]) -> Tensors:
        """The outputs of the stages before, stage after stage."""
        by_stage = self._pieces(action, used)
        return tuple(t for p in self.layout.predecessors[action.stage] for t in join(by_stage[p]))

    def _gradients(self, action: Compute, used: list[Message]) -> Tensors:
        """The gradients of the stage's outputs, added up over the stages after it."""
        successors = self.layout.successors[action.stage]
        if not successors:
            place = self.layout.stages[action.stage]
            loss = self._losses[action.stage, action.micro_batch]
            return (torch.full_like(loss, place.size / place.update),)
        by_stage = self._pieces(action, used)
        total = join(by_stage[successors[0]])
        for t in successors[1:]:
            total = tuple(a + b for a, b in zip(total, join(by_stage[t]), strict=True))
        return total

    def _pieces(self, action: Compute, used: list[Message]) -> dict[int, list[Tensors]]:
        """What other stages made for a pass, by stage, in the order of samples."""
        found: dict[int, list[Tensors]] = {}
        stage, k = action.stage, action.micro_batch
        for result in inputs_of(self.layout, action):
            samples = self.layout.shared_samples(stage, k, result.stage, result.micro_batch)
            peer = self.layout.owner(result.stage, result.micro_batch)
            if peer == self.rank:
                piece = self._values.take(result, stage, samples.start, samples.stop)
            else:
                message = Message(
                    Kind.RECEIVE, result.gradient, result.stage, stage, samples.start, samples.stop, peer
                )
                piece = self._received[message]
                used.append(message)
            found.setdefault(result.stage, []).append(piece)
        return found

    def _by_source(self, stage: int, gradients: Tensors) -> dict[int, Tensors]:
        """Gradients of a stage's inputs, by the stage that each input came from."""
        rest = iter(gradients)
        return {
            p: tuple(next(rest) for _ in self.specs[p].gradients) for p in self.layout.predecessors[stage]
        }

    def _data_of(self, stage: int, k: int) -> Tensors:
        size = self.layout.stages[stage].size
        return tuple(t[k * size : (k + 1) * size] for t in self._data.get(stage, ()))

    def _scale(self, stage: int) -> float:
        """What makes a gradient the mean over the samples of an update; losses are weighted by theirs."""
        sinks = {
            s.update for s, after in zip(self.layout.stages, self.layout.successors, strict=True) if not after
        }
        return max(sinks) / self.layout.stages[stage].update

    def _sizes(self, action: Transfer) -> tuple[int, ...]:
        spec = self.specs[action.stage]
        return spec.kept if (action.stage, action.micro_batch) in self._again else spec.saved

    def _check_sizes(self, action: Transfer, parts: Sequence[torch.Tensor]) -> None:
        here, expected = [p.numel() for p in parts], list(self._sizes(action))
        if here != expected:
            raise RunError(
                f"the stage saved {len(here)} storages of {sum(here)} bytes, and {len(expected)} of"
                f" {sum(expected)} when it was tried. Stages whose sizes change can't be evicted."
            )

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
        return (
            sum(stage.nbytes + stage.weights.nbytes for stage in self.stages.values())
            + sum(t.nbytes for tensors in self._received.values() for t in tensors)
            + sum(t.nbytes for parts in self._accepted.values() for t in parts)
        )

    def _random(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        return seeded(seed_of(self.options.seed, self.runs, stage, micro_batch), self.device)

    def _fits(self, stages: Mapping[int, StageModule]) -> None:
        if dist.get_world_size() != self.layout.ranks:
            raise RunError(f"{dist.get_world_size()} processes for a program of {self.layout.ranks} ranks.")
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
