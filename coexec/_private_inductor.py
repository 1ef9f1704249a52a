"""The private parts of TorchInductor that coexec uses, each behind a name of its own.

`tests/coexec/test_private.py` states what each is expected to do, as for those of `_private.py`.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from coexec._private import VERSION

#: The fewest elements that a part of a kernel has.
_LEAST_PART = 8192

#: The functions of PyTorch's with a replacement in the native module, which draws faster or computes parts.
_DRAWING = ("rand",)
_IN_PARTS = ("mm_out", "addmm_out", "bmm_out", "baddbmm_out", "convolution", "convolution_backward")
#: OpenMP's, likewise.
_REGIONS = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


def stride_operator() -> Any:
    """The operation of TorchInductor's graphs that gives the same values in memory as with given strides."""
    import torch._inductor.inductor_prims

    return torch.ops.prims.inductor_force_stride_order.default


def compile_ahead_of_time(
    module: torch.fx.GraphModule,
    examples: tuple[torch.Tensor, ...],
    path: str,
    threads: int,
    changed: Callable[[torch.fx.Graph], None] | None = None,
    prompt: Any = None,
    parts: int = 1,
    native: bool = False,
) -> None:
    """Compiles a graph of ATen operations with TorchInductor into a package at `path`, for so many threads.

    Random numbers come from eager's kernels, so that they are eager's numbers. `changed` gets the functional
    graph before it is lowered, and may change it. A product or a convolution does not run before calls of the
    operator `prompt` that precede it in the graph. If `native`, the code calls functions of the native module
    (`kernels.cpp`), which has to be loaded before; with more than one of `parts`, large kernels are cut into
    so many, of which that one has other threads compute some.

    Raises:
        NotImplementedError: if TorchInductor fails, or would compute something else than the graph.
    """
    import torch._inductor
    import torch._inductor.package
    import torch.fx.experimental._config

    parts = parts if native and _can_cut() else 1
    package: Any = torch._inductor.package
    size_options: Any = torch.fx.experimental._config

    options: dict[str, Any] = {
        "fallback_random": True,
        "aot_inductor.package": True,
        "cpp.threads": max(threads, parts),
        "reorder_for_locality": False,  # it would move `prompt` to where its result is used
    }
    users: Any = torch._inductor.config.post_grad_custom_pre_pass
    if changed is not None and users is None:
        options["post_grad_custom_pre_pass"] = changed
    if prompt is not None and torch._inductor.config._pre_fusion_custom_pass is None:
        options["_pre_fusion_custom_pass"] = functools.partial(_hold_back, prompt)
    if parts > 1:
        options["cpp.min_chunk_size"] = _LEAST_PART
    if any(isinstance(e, FakeTensor) for e in examples):
        for node, example in zip(module.graph.find_nodes(op="placeholder"), examples, strict=True):
            node.meta["val"] = example
    try:
        with (
            size_options.patch(backed_size_oblivious=True),  # choices hold for all sizes where they can
            warnings.catch_warnings(),
            _calling_native(in_parts=parts > 1) if native else nullcontext(),
        ):
            warnings.simplefilter("ignore")  # as errors, they would end the compilation
            files: Any = torch._inductor.aot_compile(module, examples, options=options)
    except Exception as error:  # whatever it is, the operations run without a compiler
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise NotImplementedError(f"TorchInductor fails: {said[0]}") from error
    if parts > 1 and not all(_is_cut_safely(str(file)) for file in files):
        return compile_ahead_of_time(module, examples, path, threads, changed, prompt, 1, native)
    if assumed := _assumptions(examples):
        raise NotImplementedError(f"compiled code would hold for some sizes only: {'; '.join(assumed)}")
    if _CONFUSES_DTYPES and any(_hands_dtypes_over(file) for file in files):
        raise NotImplementedError(
            f"PyTorch {torch.__version__} confuses the dtypes that compiled code gives to operators without "
            "compiled kernels; 2.13 does not"
        )
    package.package_aoti(path, files)


def _hold_back(prompt: Any, kernels: list[Any]) -> list[Any]:
    """A pass over the kernels before they are fused: library calls wait for calls of an operator before them.

    Without it, what such a call needs is fused with whatever is like it, often at the end of the graph.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.ir import MultiOutput

    latest: str | None = None
    for kernel in kernels:
        outputs = kernel.get_outputs()
        if not outputs:
            continue
        made = outputs[0].get_name()
        if getattr(kernel.node, "op_overload", None) is prompt:
            latest = made
        elif (
            latest is not None
            and (kernel.is_extern() or kernel.is_template())
            and not isinstance(kernel.node, MultiOutput)  # which belongs to another kernel
            and all(latest != dependency.name for dependency in kernel.unmet_dependencies)
        ):
            kernel.add_fake_dep(WeakDep(latest, made))
    if latest is not None:
        _find_ancestors(kernels)
    return kernels


def _find_ancestors(kernels: list[Any]) -> None:
    """Updates what TorchInductor knows to come before each kernel, of which no fusion may make a cycle."""
    for kernel in kernels:  # in an order in which they may run
        scheduler = kernel.scheduler
        for dependency in kernel.unmet_dependencies:
            name = scheduler.name_to_buf[dependency.name].defining_op_name()
            kernel.ancestors.add(name)
            kernel.ancestors |= scheduler.name_to_fused_node[name].ancestors
        kernel.ancestors -= kernel.get_operation_names()


def _can_cut() -> bool:
    """Whether the compiler translates OpenMP's regions to calls that can be redirected."""
    from torch._inductor import cpp_builder

    return sys.platform == "linux" and cpp_builder.is_gcc()


#: Held while TorchInductor's functions are not its own.
_replacing = threading.Lock()


@contextmanager
def _calling_native(in_parts: bool) -> Iterator[None]:
    """While entered, code that this thread compiles calls functions of the native module.

    If `in_parts`, OpenMP's regions have one loop each, so that nothing in them waits for other threads.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.codegen import cpp

    functions = (*_DRAWING, *_IN_PARTS) if in_parts else _DRAWING
    thread = threading.get_ident()

    with _replacing:
        usual: Any = cpp_builder.get_cpp_options
        regions: Any = cpp.WorkSharing

        def options(*args: Any, **kwargs: Any) -> Any:
            made = usual(*args, **kwargs)
            if threading.get_ident() != thread:
                return made
            definitions, include_dirs, cflags, ldflags, *rest = made
            renamed = [f"aoti_torch_cpu_{name}=coexec_cpu_{name}" for name in functions]
            wrapped = [f"Wl,--wrap={name}" for name in _REGIONS] if in_parts else []
            return [*definitions, *renamed], include_dirs, cflags, [*ldflags, *wrapped], *rest

        class Regions(regions):  # type: ignore[misc]
            def parallel(self, threads: Any) -> None:
                if in_parts and threading.get_ident() == thread:
                    self.close()
                super().parallel(threads)

            def single(self) -> Any:
                if in_parts and threading.get_ident() == thread:
                    self.close()
                return super().single()

        with (
            mock.patch.object(cpp_builder, "get_cpp_options", options),
            mock.patch.object(cpp, "WorkSharing", Regions),
        ):
            yield


def _is_cut_safely(file: str) -> bool:
    """Whether a source's regions have one loop each, and a library calls no other function of OpenMP's."""
    if file.endswith(".cpp"):
        pragmas = re.findall(r"#pragma omp (\w+)", Path(file).read_text(encoding="utf-8"))
        unlike = set(pragmas) - {"parallel", "for", "simd", "declare"}
        return not unlike and pragmas.count("parallel") == pragmas.count("for")
    return not file.endswith(".so") or re.search(rb"\0GOMP_[a-z]\w*\0", Path(file).read_bytes()) is None


def _assumptions(examples: Sequence[torch.Tensor]) -> list[str]:
    """What a compilation has taken for granted of symbols in sizes."""
    fake = next((e for e in examples if isinstance(e, FakeTensor)), None)
    if fake is None or fake.fake_mode.shape_env is None:
        return []
    env = fake.fake_mode.shape_env
    fixed = [f"{symbol} = {value}" for symbol, value in env.replacements.items() if value != symbol]
    return fixed + [str(g.expr) for g in env.guards]


def compiler_options() -> bytes:
    """The options of TorchInductor that the user may have changed."""
    import torch._inductor.config as config

    saved: bytes = config.save_config()
    return saved


def compiler_settings() -> list[tuple[str, str]]:
    """What of TorchInductor's options is not at its default, without importing TorchInductor for that."""
    unimportant = {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "aot_inductor.metadata",  # which a compilation writes
    }
    names = (n for n in os.environ if n.startswith("TORCHINDUCTOR_") and n not in unimportant)
    changed = [(name, os.environ[name]) for name in names]
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        options = config.save_config_portable()
        entries: Any = config._config
        usual = {n: (entries[n].default, entries[n].env_value_default) for n in options if n in entries}
        differs = (n for n, v in options.items() if n not in unimportant and v not in usual.get(n, ()))
        changed += [(name, repr(options[name])) for name in differs]
    return sorted(changed)


def set_compiler_options(options: bytes) -> None:
    """Takes over options from `compiler_options` of another process."""
    import torch._inductor.config as config

    config.load_config(options)


#: Compiled code then reads the serialized number of a dtype (float32: 7) as the number that C++ has for
#: another one (float64: 7).
_CONFUSES_DTYPES = VERSION < (2, 13)


def _hands_dtypes_over(file: Any) -> bool:
    """Whether a file of a package lists calls of operators with a dtype among the arguments."""
    path = str(file)
    if not path.endswith(".json"):
        return False
    with open(path, encoding="utf-8") as text:
        return '"as_scalar_type"' in text.read()
