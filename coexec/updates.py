"""Makes the updates of a program's optimizers as single torch calls.

In:  calls of functional forms (`torch.optim.adam.adam`), while an iteration is traced or co-executed.
Out: for each of them three calls through the function modes: one that looks at the step counters, one that
     updates, and one that says that the update is done.

An optimizer that always updates the same parameters updates all of them in one call. One that does not
(some had no gradient in an iteration, as with layer drop) updates them one by one: what it does to each is
then the same in all iterations, whichever others it updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.overrides import handle_torch_function

from coexec._private import is_inmost
from coexec.tracegraph.optimizers import FUNCTIONALS, Functional, Update, counts_of, updated


@dataclass(slots=True)
class Updates:
    """The updates of one program.

    `together` has for each parameter those that were last updated in one call with it. `apart` are the
    functional forms that did not always get the same ones. Tensors are known by `id`: another one that takes
    the place of one costs a trace at most.
    """

    forms: dict[Functional, Update] = field(default_factory=lambda: {f: Update(f) for f in FUNCTIONALS})
    together: dict[tuple[Update, int], tuple[int, ...]] = field(default_factory=dict)
    apart: set[Update] = field(default_factory=set)

    def make(self, functional: Functional, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes a call of a functional form."""
        update = self.forms[functional]
        if not is_inmost():  # somebody else looks at the calls, or changes them
            return update.original(*args, **kwargs)
        arguments = update.named(args, kwargs)
        if arguments is None or not update.applies(arguments):
            update.original(*args, **kwargs)
        else:
            for call in self._calls(update, arguments):
                _make(update, call)
        _call(updated)
        return None

    def _calls(self, update: Update, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments of the calls that the update is made of."""
        if update not in self.apart:
            self._compare(update, tuple([id(p) for p in arguments["params"]]))
        return update.split(arguments) if update in self.apart else [arguments]

    def _compare(self, update: Update, parameters: tuple[int, ...]) -> None:
        if self.together.get((update, parameters[0])) == parameters:
            return
        for p in parameters:
            if self.together.setdefault((update, p), parameters) != parameters:
                self.apart.add(update)


def _make(update: Update, arguments: dict[str, Any]) -> None:
    counters = update.counters(arguments)
    known = update.numbers(arguments, _call(counts_of, counters) if counters else [])
    if known is None:
        return update.original(**arguments)
    numbers, pattern = known
    _call(update, numbers, pattern, **arguments)
    return None


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return handle_torch_function(function, (), *args, **kwargs)
