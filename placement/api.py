"""What other people's backends register themselves with."""

from __future__ import annotations

from placement.backends.base import Backend
from placement.patterns.language import Pattern
from placement.patterns.rules import PatternRule
from placement.registry import REGISTRY


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Makes a backend available to this process.

    Args:
        backend: an instance of a subclass of `Backend`.
        replace: whether it may take the place of one of the same name.

    Raises:
        BackendError: if there is one of that name and `replace` is not set.
    """
    REGISTRY.register(backend, replace=replace)


def add_backend_pattern(backend: str, pattern: Pattern) -> None:
    """Says that a backend runs what a pattern matches as one.

    Args:
        backend: its name; it may be registered later.
        pattern: built with `is_op`, `wildcard`, `constant` and so on.

    Raises:
        PatternError: if `pattern` is no pattern.
    """
    REGISTRY.add_pattern(backend, pattern)


def add_backend_pattern_rule(backend: str, rule: PatternRule) -> None:
    """Says by a rule what a backend runs as one.

    Args:
        backend: its name; it may be registered later.
        rule: an instance of a subclass of `PatternRule`.

    Raises:
        PatternError: if `rule` is no rule.
    """
    REGISTRY.add_rule(backend, rule)
