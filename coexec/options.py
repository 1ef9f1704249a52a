"""Options: how programs are run, for all tapes (`coexec.options`) or one (keyword arguments).

In:  keyword arguments of `GradientTape`, over the defaults in `options`.
Out: a frozen `Options`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from coexec.errors import OptionError

Executor = Literal["aten", "inductor", "placed"]
Mode = Literal["coexec", "lazy", "eager"]


@dataclass
class Options:
    """Defaults of every tape.

    Attributes:
        executor: what runs the symbolic graph. `aten` runs the operations one by one with eager's
            kernels: results are bit-for-bit equal. `inductor` compiles each block: results are
            equal within floating-point reassociation. `placed` runs each part on the backend that
            `placement` measures to be fastest, equal within 1e-4 relative.
        mode: `coexec` runs both runners at once; `lazy` starts the GraphRunner only when Python
            looks at a value or the block ends; `eager` leaves the program alone.
        synchronous: whether leaving the block waits until the GraphRunner is done. If not, the next
            use of a tensor that the iteration reads or writes waits, and the program's next iteration
            begins while this one is computed.
        background: whether a program goes on with `aten` while another process compiles blocks for
            `inductor`; if not, it waits. Blocks that are on disk already are used at once.
        eager_if_faster: whether iterations run eagerly where that is measured to be faster: call by call, or
            on the graph with `aten`. Now and then some run in each way.
        check: whether the verifiers run after every step that makes a structure.
        max_traces: traces of one program that are merged (at least 2). With so many, what is new falls back
            and is not learned; where nothing has been co-executed by then, the program runs call by call.
    """

    executor: Executor = "aten"
    mode: Mode = "coexec"
    synchronous: bool = True
    background: bool = True
    eager_if_faster: bool = True
    check: bool = False
    max_traces: int = 64

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ALLOWED:
            raise OptionError(f"no option {name!r}; the options are {', '.join(_ALLOWED)}")
        allowed = _ALLOWED[name]
        if isinstance(allowed, tuple):
            if value not in allowed:
                raise OptionError(f"{name}={value!r}; it can be {' or '.join(map(repr, allowed))}")
        elif not isinstance(value, allowed) or (allowed is int and (isinstance(value, bool) or value < 2)):
            raise OptionError(
                f"{name}={value!r}; it has to be {'an int above 1' if allowed is int else 'a bool'}"
            )
        object.__setattr__(self, name, value)

    def replaced(self, **changes: Any) -> Options:
        """A copy with some options changed; None leaves an option as it is."""
        return dataclasses.replace(self, **{k: v for k, v in changes.items() if v is not None})


_ALLOWED: dict[str, Any] = {
    "executor": get_args(Executor),
    "mode": get_args(Mode),
    "synchronous": bool,
    "background": bool,
    "eager_if_faster": bool,
    "check": bool,
    "max_traces": int,
}

#: The defaults of all tapes; assign to its attributes to change them.
options = Options()
