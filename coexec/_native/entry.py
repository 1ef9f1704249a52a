"""Function modes that torch calls enter through C++, where there is the native module.

A call of a mode that PyTorch's Python code makes has another executed location when a C function answers
it than when a Python function does, so every mode of the two phases is entered in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from torch.overrides import TorchFunctionMode

from coexec._native import core
from coexec._private import OwnMode, entered_again


class EnteredNatively(OwnMode, TorchFunctionMode):
    """A function mode; what `lead` was given answers before `__torch_function__` does.

    Attributes:
        outermost: the frame that executed locations begin below.
    """

    outermost: FrameType

    @contextmanager
    def below(self, frame: FrameType) -> Iterator[None]:
        """Enters the mode once more while it answers a call, for those that are made below a frame."""
        outer = self.outermost
        self.locate_below(frame)
        try:
            with entered_again(self):
                yield
        finally:
            self.locate_below(outer)

    def locate_below(self, frame: FrameType) -> None:
        """Has executed locations begin below another frame."""
        self.outermost = frame

    def __enter__(self) -> Any:
        if core is not None:
            self.__dict__["__torch_function__"] = core.attach(self, self.__torch_function__)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if core is not None:
            del self.__dict__["__torch_function__"]
            core.detach(self)

    def lead(self, answering: Any) -> None:
        """Lets a native object answer first, or none; kept alive by the caller."""
        core.lead(self, answering)
