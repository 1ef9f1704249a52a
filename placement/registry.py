"""The registry: which backends there are, and the patterns and rules of each.

One registry serves the process (`REGISTRY`); tests make their own. Installed packages add backends
through the entry point group `coexec.backends`: each entry names a function or a Backend class that
is called once, without arguments, and returns a Backend (or None, if it registered things itself).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from placement.backends import built_in
from placement.backends.base import Backend
from placement.errors import BackendError, PatternError
from placement.patterns.language import Pattern
from placement.patterns.rules import PatternRule

REFERENCE = "aten"
"""The backend that runs what nothing else runs, and that the others are verified against."""
log = logging.getLogger(__name__)
GROUP = "coexec.backends"
"""The entry point group of packages that bring a backend."""


class Registry:
    """Backends by name, each with its patterns and rules."""

    def __init__(self, backends: Iterable[Backend] = ()) -> None:
        self._backends: dict[str, Backend] = {}
        self._patterns: dict[str, list[Pattern]] = {}
        self._rules: dict[str, list[PatternRule]] = {}
        self.broken: dict[str, str] = {}
        """Entry points that could not be loaded, and why."""
        for backend in backends:
            self.register(backend)

    def register(self, backend: Backend, *, replace: bool = False) -> None:
        """Adds a backend, with the patterns and rules that it brings.

        Raises:
            BackendError: if there is one of that name and `replace` is not set.
        """
        name = backend.name
        if not name or not isinstance(name, str):
            raise BackendError(f"{type(backend).__name__} has no name. Set the class attribute `name`.")
        if name in self._backends and not replace:
            raise BackendError(
                f"there is already a backend {name!r} ({type(self._backends[name]).__name__}). "
                "Give yours another name, or pass replace=True."
            )
        self._backends[name] = backend

    def add_pattern(self, backend: str, pattern: Pattern) -> None:
        """Says that a backend runs a pattern as one; the backend may be registered later."""
        if not isinstance(pattern, Pattern):
            raise PatternError(f"{pattern!r} is no pattern. Build one with placement.is_op(...).")
        self._patterns.setdefault(backend, []).append(pattern)

    def add_rule(self, backend: str, rule: PatternRule) -> None:
        """Says by a rule what a backend runs as one; the backend may be registered later."""
        if not isinstance(rule, PatternRule):
            raise PatternError(
                f"{rule!r} is no PatternRule. Pass an instance: add_backend_pattern_rule(backend, MyRule())."
            )
        self._rules.setdefault(backend, []).append(rule)

    def get(self, name: str) -> Backend:
        """A backend by name.

        Raises:
            BackendError: if there is none.
        """
        if name not in self._backends:
            close = difflib.get_close_matches(name, self._backends, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise BackendError(f"there is no backend {name!r}; there are {', '.join(self._backends)}.{hint}")
        return self._backends[name]

    def choose(self, names: Sequence[str] | None, devices: set[str]) -> list[Backend]:
        """The backends by these names, or (None) all that can be used here; the reference first.

        Raises:
            BackendError: if one is unknown, or named and missing.
        """
        if isinstance(names, str):
            raise BackendError(f"backends must be a list of names, such as [{names!r}].")
        if names is None:
            found = [b for b in self if b.automatic and devices & set(b.devices) and not b.missing()]
        else:
            found = [self.get(name) for name in dict.fromkeys(names)]
            for backend in found:
                why = backend.missing()
                if why:
                    raise BackendError(f"the backend {backend.name} cannot be used here: {why}.")
        reference = self.get(REFERENCE)
        return [reference, *(b for b in found if b is not reference)]

    def patterns(self, name: str) -> tuple[Pattern, ...]:
        """The patterns of a backend: its own, and those that users added."""
        own = self._backends[name].patterns() if name in self._backends else ()
        return (*own, *self._patterns.get(name, ()))

    def rules(self, name: str) -> tuple[PatternRule, ...]:
        """The rules of a backend: its own, and those that users added."""
        own = self._backends[name].rules() if name in self._backends else ()
        return (*own, *self._rules.get(name, ()))

    def __iter__(self) -> Iterator[Backend]:
        return iter(tuple(self._backends.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._backends

    def load_entry_points(self) -> None:
        """Registers the backends of installed packages; one that fails is a line in `broken`."""
        for entry in metadata.entry_points(group=GROUP):
            if entry.name in self._backends or entry.name in self.broken:
                continue
            try:
                made = entry.load()()
                if made is not None:
                    self.register(made)
            except Exception as error:
                log.warning("the backend %s of %s cannot be loaded: %s", entry.name, entry.value, error)
                self.broken[entry.name] = f"{type(error).__name__}: {error}"


REGISTRY = Registry(built_in())
"""The registry of this process."""
