"""Why a program, or one iteration of it, did not run in the co-execution phase.

Each reason has a stable id, what happened, and what a user can do. `docs/fallbacks.md` is made of
this table. A *program* reason means that the program has no graph of the whole iteration and runs call
by call (the dynamic phase); an *iteration* reason (a fallback) concerns one iteration, whose trace is
merged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """An entry of the registry."""

    id: str
    title: str
    hint: str


def _registry(*reasons: Reason) -> dict[str, Reason]:
    return {r.id: r for r in reasons}


REASONS = _registry(
    Reason(
        "CX0001",
        "new path",
        "Nothing to do: the new trace is merged into the TraceGraph.",
    ),
    Reason(
        "CX0002",
        "an exception left the block",
        "Nothing to do: the state is that of eager execution.",
    ),
    Reason(
        "CX0003",
        "a tensor outlived the iteration for the first time",
        "Nothing to do: it is kept from now on.",
    ),
    Reason(
        "CX0004",
        "a captured tensor was replaced",
        "Nothing to do: it is fed from now on.",
    ),
    Reason(
        "CX0005",
        "the graph failed where eager execution decides",
        "See the exception that eager execution raised.",
    ),
    Reason(
        "CX0101",
        "operations ran outside of any torch call",
        "Move the call that launches them out of the block.",
    ),
    Reason(
        "CX0102",
        "user code ran inside of a torch call",
        "Nothing to do: the program runs call by call, and these calls eagerly.",
    ),
    Reason(
        "CX0103",
        "a tensor changed outside of any torch call",
        "Nothing to do: the program runs call by call.",
    ),
    Reason(
        "CX0104",
        "autograd history comes from outside of the block",
        "Compute the loss inside of the block, or detach.",
    ),
    Reason(
        "CX0105",
        "autograd history outlives the block",
        "Call backward inside of the block, or detach what you keep.",
    ),
    Reason(
        "CX0106",
        "a result depends on data inside of a torch call",
        "Nothing to do: the program runs call by call, and these calls eagerly.",
    ),
    Reason(
        "CX0107",
        "a tensor is not a plain strided tensor",
        "Nothing to do: the program runs call by call, and these calls eagerly.",
    ),
    Reason("CX0108", "an external tensor's attributes changed", "Do it outside of the block."),
    Reason("CX0109", "a call needs what a symbolic tensor does not have", "Call it outside of the block."),
    Reason("CX0110", "an argument cannot be compared", "Pass numbers, strings and tensors."),
    Reason("CX0111", "a torch call reads a tensor that nothing explains", "Pass the tensor as an argument."),
    Reason(
        "CX0112",
        "other hooks are on a leaf than when the iteration began",
        "Register and remove hooks of parameters between iterations.",
    ),
    Reason(
        "CX0113",
        "another torch function or dispatch mode is active",
        "Enter the mode inside of the tape, or not at all.",
    ),
    Reason("CX0114", "memory shared with NumPy was written", "Copy the array before you write to it."),
    Reason("CX0115", "tensors that share memory are written and read back", "Give each its own memory."),
    Reason(
        "CX0116",
        "too many different traces",
        "Nothing to do: the program runs call by call. Keys for the variants may help.",
    ),
    Reason(
        "CX0117",
        "the iteration was too different from its traces too often",
        "Nothing to do: the program runs call by call until its paths are known.",
    ),
    Reason("CX0118", "random state was changed between torch calls", "Draw from the default generator."),
    Reason("CX0119", "the tape was used on several threads", "Use one tape a thread, with a key of its own."),
    Reason(
        "CX0120",
        "the program is slower than in eager execution",
        "Use inductor, or leave a processor to Python; eager meanwhile, and measured again now and then.",
    ),
    Reason(
        "CX0121",
        "the processor began to round otherwise, or to flush denormal numbers",
        "Call torch.set_flush_denormal outside of the block.",
    ),
    Reason(
        "CX0201", "a block runs by the aten executor", "Results are right; only the compiler is not used."
    ),
)


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason with the place and the details of one occurrence."""

    reason: Reason
    detail: str
    where: str

    def __str__(self) -> str:
        return f"{self.reason.id} {self.reason.title}: {self.detail} (from {self.where})"


def cause(id_: str, detail: str, where: str) -> Cause:
    """Makes a `Cause` of the registry's reason `id_`."""
    return Cause(REASONS[id_], detail, where)
