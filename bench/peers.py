"""What a program can be captured by instead of co-execution, applied as its users apply it.

`compile` and `fullgraph` are `torch.compile` without and with the demand for one graph. `trace` and `export`
are `torch.jit.trace` and `torch.export` of the model, with the inputs of its first call; the rest of the step
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from bench.randomness import RandomState

Peer = Literal["compile", "fullgraph", "trace", "export", "coexec"]
ModelPeer = Literal["trace", "export"]
PEERS: tuple[Peer, ...] = ("compile", "fullgraph", "trace", "export", "coexec")
Backend = Literal["inductor", "aot_eager"]
BACKENDS: tuple[Backend, ...] = ("inductor", "aot_eager")


@dataclass(frozen=True, slots=True)
class Counts:
    """What torch.compile counted in this process."""

    graph_breaks: int
    recompilations: int


def compile_options(peer: Peer, backend: Backend) -> dict[str, Any]:
    """Return the arguments of torch.compile; inductor's random numbers are eager's, to be comparable."""
    options: dict[str, Any] = {"backend": backend, "fullgraph": peer == "fullgraph"}
    if backend == "inductor":
        options["options"] = {"fallback_random": True}
    return options


def count_compilations() -> Counts:
    """Return how often Dynamo broke a graph, and how often it compiled a frame again."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    # A compile id is frame/number, and the number goes on from 0 with each recompilation of the frame.
    ids = [metrics.compile_id for metrics in get_compilation_metrics() if metrics.compile_id]
    again = {text for text in map(str, ids) if text.partition("/")[2].partition("_")[0] != "0"}
    return Counts(sum(counters["graph_break"].values()), len(again))


class CapturedForward:
    """Stands in for a model's `forward`: captures the model when it is first called, and runs the capture."""

    def __init__(self, model: nn.Module, peer: ModelPeer) -> None:
        self.model = model
        self.peer = peer
        self.captured: Callable[..., Any] | None = None
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured model."""
        if self.captured is None:
            # Capturing runs the model; a user would do it before training.
            before = RandomState.capture()
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            del self.model.forward  # the class's own is captured
            self.captured = self._capture(args, kwargs)
            self.model.forward = self
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])
            before.restore()
        return self.captured(*args, **kwargs)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if self.peer == "export":
            exported: Callable[..., Any] = torch.export.export(
                self.model, args, kwargs, strict=False
            ).module()
            return exported
        inputs = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
        traced: Callable[..., Any] = torch.jit.trace(self.model, check_trace=False, **inputs)
        return traced


def capture_models(models: tuple[nn.Module, ...], peer: ModelPeer) -> list[CapturedForward]:
    """Let the models be captured when they are first called."""
    return [CapturedForward(model, peer) for model in models]
