"""Errors that coexec raises.

    CoexecError
    |-- OptionError          an option has a value that it cannot have (also a ValueError)
    |-- TapeError            a tape is used where it cannot be (also a RuntimeError)
    |-- VerificationError    a structure breaks one of its rules (a bug in coexec)
    `-- CommitError          the GraphRunner failed while it wrote results (also a RuntimeError)

Falling back to eager execution is no error: see `coexec.explain`.
"""

from __future__ import annotations


class CoexecError(Exception):
    """Base of all errors that coexec raises."""


class OptionError(CoexecError, ValueError):
    """An option has a value that it cannot have."""


class TapeError(CoexecError, RuntimeError):
    """A tape is used where it cannot be."""


class VerificationError(CoexecError, AssertionError):
    """A structure breaks one of its rules; please report it with the printed structure."""


class CommitError(CoexecError, RuntimeError):
    """The GraphRunner failed while it wrote results: parameters may be half updated."""
