"""The native module's kernels for compiled blocks, called as compiled code calls them."""

from __future__ import annotations

import ctypes

import torch

from coexec._native import core

KERNELS = [
    f"coexec_cpu_{name}"
    for name in (
        "mm_out", "addmm_out", "bmm_out", "baddbmm_out", "convolution", "convolution_backward", "rand",
    )
]  # fmt: skip

REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def load():
    """The module as a library of C functions."""
    library = ctypes.CDLL(core.__file__)
    for name in KERNELS:
        getattr(library, name).restype = ctypes.c_int
    return library


def handle(tensor):
    """A reference to a tensor as compiled code has it; it is never given back, which a test can afford."""
    [capsule] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(capsule, None))


def tensor_of(pointer):
    """The tensor of a reference that a kernel has given."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(make(pointer, None, None))


def numbers(values):
    """A list of numbers as two arguments."""
    values = list(values)
    return (ctypes.c_int64 * len(values))(*values), ctypes.c_int64(len(values))


def region(native, parts, body):
    """Runs a region of OpenMP's, whose body gets the number of a part."""
    part_of_thread = getattr(native, "__wrap_omp_get_thread_num")
    getattr(native, "__wrap_GOMP_parallel")(REGION(lambda _: body(part_of_thread())), None, parts, 0)
