"""One block to be compiled, in this process or another.

In:  its graph and what it reads.
Out: the path of its library, compiled at most once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule

from coexec._private import compile_ahead_of_time
from coexec.executors.cache import install, path_of
from coexec.tracegraph.sizes import fixed
from coexec.tracegraph.trace import TensorMeta

log = logging.getLogger(__name__)


class Unsupported(Exception):
    """A block holds something that cannot be compiled; the message says what."""


@dataclass(frozen=True, slots=True)
class InputMeta:
    """What a compiled block is made for: an input's geometry and type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(meta: TensorMeta) -> InputMeta:
        """What is relevant of a tensor's metadata."""
        return InputMeta(fixed(meta.shape), fixed(meta.stride), meta.dtype, str(meta.device))

    def example(self) -> torch.Tensor:
        """A tensor like that."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


#: The first input of each block, which orders its communication.
TOKEN = InputMeta((1,), (1,), torch.float32, "cpu")


@dataclass(frozen=True, slots=True)
class Job:
    """A graph of ATen operations, its inputs, and where its library belongs."""

    module: GraphModule
    inputs: tuple[InputMeta, ...]
    path: Path


def make_job(module: GraphModule, inputs: tuple[InputMeta, ...]) -> Job:
    """The job of compiling a graph; equal graphs have one path."""
    constants = {n: (t.dtype, t.tolist()) for n, t in module.named_buffers()}
    return Job(module, inputs, path_of(repr((module.code, constants, inputs))))


def compiled(job: Job) -> Path:
    """The library of a job, which is compiled now if it is not there.

    Raises:
        Unsupported: if TorchInductor cannot compile it.
    """
    if not job.path.exists():
        log.info("compiling a block of %d operations", len(job.module.graph.nodes))
        examples = tuple(i.example() for i in job.inputs)
        try:
            install(job.path, lambda target: compile_ahead_of_time(job.module, examples, target))
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
    return job.path
