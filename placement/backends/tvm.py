"""The tvm backend: a segment as a Relax module, run on PyTorch's memory through DLPack.

Untuned, TVM's generated loops are far slower than the libraries; MetaSchedule's tuning takes minutes for
a segment. So this backend takes part only when it is named, and it tunes when `trials` is above 0, in a
process into which PyTorch is not imported (tuning beside it hung or crashed). What tuning finds is kept
in the cost log and used from then on.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from placement.backends.base import Backend, Run, Tunings
from placement.backends.exported import empty
from placement.backends.fusion import FuseIntoHeavy
from placement.backends.optional import missing_packages, version_of
from placement.backends.tvm_tuning import tune
from placement.decompositions import front_end_table
from placement.errors import Unsupported
from placement.patterns.rules import PatternRule
from placement.segments import Segment


class TVM(Backend):
    """Generated loops, tuned for the segment if asked for.

    Args:
        trials: programs that tuning measures for a segment; 0: what earlier tuning kept, else untuned.
        tuning_s: seconds after which a tuning is given up.
    """

    name: ClassVar[str] = "tvm"
    level: ClassVar[Any] = "graph"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    automatic: ClassVar[bool] = False

    def __init__(self, trials: int = 0, tuning_s: float = 600.0) -> None:
        self.trials = trials
        self.tuning_s = tuning_s
        self._tunings: Tunings | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A child process only tries whether a segment runs at all; it neither tunes nor reads tunings.
        return {**self.__dict__, "_tunings": None}

    def attach(self, tunings: Tunings) -> None:
        """Tunings are read from and kept in the cost log."""
        self._tunings = tunings

    def missing(self) -> str | None:
        """It needs the compiler with its PyTorch front end."""
        return missing_packages("tvm")

    def rules(self) -> tuple[PatternRule, ...]:
        """Heavy operations with what follows them."""
        return (FuseIntoHeavy(),)

    def supports(self, segment: Segment) -> str | None:
        """Floating-point inputs only: DLPack has no booleans for it."""
        if any(s.dtype == torch.bool for s in (*segment.inputs, *segment.outputs)):
            return "it has boolean tensors"
        return None if segment.inputs else "it has no input"

    def lower(self, segment: Segment) -> Any:
        """The Relax module, constants as further inputs, operators lowered to fused loops."""
        import tvm
        from tvm import relax
        from tvm.relax.frontend.torch import from_exported_program

        module, constants = with_constants_as_inputs(segment.module)
        examples = (*(empty(s) for s in segment.inputs), *constants)
        try:
            with warnings.catch_warnings():  # it uses what newer versions of PyTorch deprecate
                warnings.simplefilter("ignore")
                program = torch.export.export(module, examples).run_decompositions(front_end_table())
                relaxed = from_exported_program(program, run_ep_decomposition=False)
            with tvm.target.Target(target_of(segment.device)):
                passes = [
                    relax.transform.LegalizeOps(),
                    relax.transform.AnnotateTIROpPattern(),
                    relax.transform.FuseOps(),
                    relax.transform.FuseTIR(),
                ]
                return tvm.transform.Sequential(passes)(relaxed), constants
        except Exception as error:
            raise Unsupported(f"tvm: {type(error).__name__}: {_last_line(error)}") from error

    def compile(self, lowered: Any, segment: Segment) -> Run:
        """A Relax virtual machine over the tuned, or plain, loops."""
        import tvm
        from tvm import relax

        relaxed, constants = lowered
        settings = target_of(segment.device)
        name = hashlib.sha256(f"{segment.key}{settings}{self.version_key()}".encode()).hexdigest()[:32]
        tuning = None
        if self._tunings is not None:
            tuning = tune(name, relaxed, settings, self.trials, self.tuning_s, self._tunings)
        device = tvm.cuda() if segment.device == "cuda" else tvm.cpu()
        try:
            target = tvm.target.Target(settings)
            with target, tempfile.TemporaryDirectory() as folder:
                if tuning is not None:
                    tuning.write(Path(folder))
                    relaxed = relax.transform.MetaScheduleApplyDatabase(folder)(relaxed)
                machine = relax.VirtualMachine(tvm.compile(relaxed, target), device)
        except Exception as error:
            raise Unsupported(f"tvm: {type(error).__name__}: {_last_line(error)}") from error
        return _bound(machine, constants)

    def version_key(self) -> str:
        """The compiler's version and how it tunes."""
        return f"{version_of('apache-tvm')} trials {self.trials} torch {torch.__version__}"


def _bound(machine: Any, constants: list[torch.Tensor]) -> Run:
    import tvm

    main = machine["main"]
    from_torch = tvm.runtime.from_dlpack
    held = [from_torch(c.detach().contiguous()) for c in constants]

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = main(*(from_torch(x.detach().contiguous()) for x in inputs), *held)
        return tuple(torch.utils.dlpack.from_dlpack(o) for o in outputs)

    return run


def with_constants_as_inputs(module: GraphModule) -> tuple[GraphModule, list[torch.Tensor]]:
    """A module whose constants are inputs after its own inputs, and the constants."""
    graph = Graph()
    env: dict[Node, Node] = {}
    constants: list[torch.Tensor] = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            constants.append(getattr(module, str(node.target)))
            env[node] = graph.placeholder(str(node.target))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return GraphModule({}, graph), constants


def target_of(device: str) -> dict[str, Any]:
    """TVM's description of the device."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return {"kind": "cuda", "arch": f"sm_{major}{minor}"}
    capability = torch.backends.cpu.get_cpu_capability()
    names = {"AVX512": "skylake-avx512", "AVX2": "haswell"}
    cores = {"num-cores": torch.get_num_threads()}
    return {"kind": "llvm", **({"mcpu": names[capability]} if capability in names else {}), **cores}


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:300]
