"""The errors that users of `placement` see.

    PlacementError
    +-- PatternError         a pattern or rule that cannot be what it says
    |   +-- RuleExplosion    a pattern rule that allows more subgraphs than its bound
    +-- BackendError         a backend that is unknown, missing or registered twice
    +-- CaptureError         a model that cannot be captured as one graph of ATen operations
    +-- Unsupported          a backend that cannot run a segment (raised by backends)
    +-- CostLogError         a cost log that cannot be opened or is no cost log

All of them derive from ValueError: the caller gave something that cannot be used.
"""

from __future__ import annotations


class PlacementError(ValueError):
    """What every error of this package derives from."""


class PatternError(PlacementError):
    """A pattern names an operation or attribute that ATen lacks, or a rule misbehaves."""


class RuleExplosion(PatternError):
    """A pattern rule allows more subgraphs than its bound."""


class BackendError(PlacementError):
    """A backend is unknown, not installed, or registered twice."""


class CaptureError(PlacementError):
    """A model cannot be captured, or inputs don't fit a captured one."""


class Unsupported(PlacementError):
    """A backend cannot run a segment; the message says why."""


class CostLogError(PlacementError):
    """A cost log cannot be opened, or the file is something else."""
