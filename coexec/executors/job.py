"""One block to be compiled, in this process or another.

In:  its graph and what it reads.
Out: the path of its library, compiled at most once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from coexec._native import core
from coexec._private import fake_mode_of, symbolic_carriers
from coexec._private_inductor import compile_ahead_of_time
from coexec.executors.cache import install, path_of
from coexec.executors.channels_last import KeepsLayout, to_channels_last
from coexec.pace import processors
from coexec.tracegraph.program import Given
from coexec.tracegraph.sizes import Symbol, renumbered, value_of
from coexec.tracegraph.trace import Dimension

log = logging.getLogger(__name__)


class Unsupported(Exception):
    """A block holds something that cannot be compiled; the message says what."""


@dataclass(frozen=True, slots=True)
class InputMeta:
    """What a compiled block is made for: an input's geometry and type."""

    shape: tuple[Dimension, ...]
    stride: tuple[Dimension, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(given: Given, numbers: Mapping[int, int]) -> InputMeta:
        """What a block takes for granted of a tensor, its symbols renumbered."""
        shape = tuple(renumbered(s, numbers) for s in given.shape)
        stride = tuple(renumbered(s, numbers) for s in given.stride)
        return InputMeta(shape, stride, given.dtype, str(given.device))

    def example(self, symbols: Sequence[Any]) -> torch.Tensor:
        """A tensor like that, with these symbols."""
        size, stride = ([value_of(n, symbols.__getitem__) for n in s] for s in (self.shape, self.stride))
        sizes: Any = size
        strides: Any = stride
        return torch.empty_strided(sizes, strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class SymbolInput:
    """A tensor that has as many elements as a symbol in sizes is, and what that may be."""

    low: int
    high: int
    usual: int

    @staticmethod
    def of(symbol: Symbol) -> SymbolInput:
        """For a symbol and others near it, so that a library serves when traces add to what it may be."""
        return SymbolInput(min(symbol.low, 2), 4 << symbol.high.bit_length(), symbol.high // 2)


#: The first input of each block, which orders its communication.
TOKEN = InputMeta((1,), (1,), torch.float32, "cpu")


@dataclass(frozen=True, slots=True)
class Job:
    """A graph of ATen operations, its inputs, what its kernels are like, and where its library belongs.

    Kernels have `threads` of OpenMP's, or are cut into `parts`. If `native`, some are of the native module.
    """

    module: GraphModule
    inputs: tuple[InputMeta | SymbolInput, ...]
    threads: int
    parts: int
    native: bool
    path: Path


def make_job(module: GraphModule, inputs: tuple[InputMeta | SymbolInput, ...]) -> Job:
    """The job of compiling a graph; equal graphs have one path."""
    constants = {n: (t.dtype, t.tolist()) for n, t in module.named_buffers()}
    threads, parts, native = kernel_threads(), kernel_parts(), finds_native()
    path = path_of(repr((module.code, constants, inputs, threads, parts, native)))
    return Job(module, inputs, threads, parts, native, path)


def kernel_threads() -> int:
    """How many threads the kernels of compiled blocks run on: at least one processor is Python's."""
    return min(torch.get_num_threads(), max(1, processors() - 1))


@functools.cache
def finds_native() -> bool:
    """Whether compiled blocks find the functions of the native module that take the place of PyTorch's."""
    return core is not None and core.show_names()


def kernel_parts() -> int:
    """Into how many parts large kernels of compiled blocks are cut, for other threads to take some."""
    return 2 if kernel_threads() == 1 < torch.get_num_threads() and finds_native() else 1


def _examples(job: Job) -> tuple[torch.Tensor, ...]:
    symbols = [i for i in job.inputs if isinstance(i, SymbolInput)]
    if not symbols:
        return tuple(i.example(()) for i in job.inputs if isinstance(i, InputMeta))
    carriers = symbolic_carriers([(s.low, s.high, s.usual) for s in symbols])
    left = iter(carriers)
    sizes = [c.shape[0] for c in carriers]
    with fake_mode_of(carriers[0]):
        return tuple(i.example(sizes) if isinstance(i, InputMeta) else next(left) for i in job.inputs)


def _compile(job: Job, examples: tuple[torch.Tensor, ...], file: str) -> None:
    prompt = torch.ops.coexec.fetch.default  # Python may be waiting for it
    kept: list[KeepsLayout] = []

    def change(graph: Graph) -> None:
        try:
            to_channels_last(graph)
        except KeepsLayout as error:
            kept.append(error)
            raise

    try:
        compile_ahead_of_time(job.module, examples, file, job.threads, change, prompt, job.parts, job.native)
    except NotImplementedError:
        if not kept:
            raise
        log.info("in the program's memory formats: %s", kept[0])
        compile_ahead_of_time(job.module, examples, file, job.threads, None, prompt, job.parts, job.native)


def compiled(job: Job) -> Path:
    """The library of a job, which is compiled now if it is not there.

    Raises:
        Unsupported: if TorchInductor cannot compile it.
    """
    if not job.path.exists():
        log.info("compiling a block of %d operations", len(job.module.graph.nodes))
        examples = _examples(job)
        try:
            install(job.path, lambda file: _compile(job, examples, file))
        except NotImplementedError as error:
            raise Unsupported(str(error)) from error
    return job.path
