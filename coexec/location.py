"""Executed locations: the chain of call sites from the tape's block down to a torch call.

Chains are interned, so a location is a small number and comparing two is comparing numbers.
The native module walks the frames; the version here is its reference and its stand-in.
"""

from __future__ import annotations

import dis
import os
import sys
from types import CodeType, FrameType

from coexec._native import core
from coexec._private import TORCH_DIRECTORY

_ids: dict[tuple[tuple[int, int], ...], int] = {}
_chains: list[list[tuple[CodeType, int]]] = []
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


#: Python 3.11 has two instructions for a call. Once it has specialized the first one, that one makes the
#: call, and the second one is never reached: the place has to be the same before and after.
_PRECALL = dis.opmap.get("PRECALL")
_PRECALL_SIZE = 4  # bytes of the instruction and its cache
_calls: dict[tuple[CodeType, int], int] = {}


def _call_site(code: CodeType, instruction: int) -> tuple[CodeType, int]:
    if _PRECALL is None or instruction < 0:
        return code, instruction
    known = _calls.get((code, instruction))
    if known is None:
        precall = code.co_code[instruction] == _PRECALL
        known = _calls[code, instruction] = instruction + _PRECALL_SIZE if precall else instruction
    return code, known


def locate_reference(skip: int, outermost: FrameType) -> int:
    """The location of the caller, without its `skip` innermost frames, up to frame `outermost`."""
    frame: FrameType | None = sys._getframe(1 + skip)
    chain = []
    while frame is not None:
        chain.append(_call_site(frame.f_code, frame.f_lasti))
        frame = None if frame is outermost else frame.f_back
    key = tuple((id(code), instruction) for code, instruction in chain)
    if key not in _ids:
        _ids[key] = len(_chains)
        _chains.append(chain)  # keeps the code objects alive, so their ids stay unique
    return _ids[key]


def _sites_reference(location: int) -> list[tuple[CodeType, int]]:
    return _chains[location]


locate = core.locate if core else locate_reference
_sites = core.sites if core else _sites_reference


def sites(location: int) -> list[tuple[CodeType, int]]:
    """The call sites of a location, innermost first: code objects and instruction offsets."""
    return _sites(location) if location >= 0 else []


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return line


def describe(location: int) -> str:
    """`file.py:line` of the innermost call site in the user's code."""
    chain = sites(location)
    for code, instruction in chain:
        if not code.co_filename.startswith((TORCH_DIRECTORY, _PACKAGE)):
            return f"{os.path.basename(code.co_filename)}:{line_of(code, instruction)}"
    return "an unknown place"
