"""What goes wrong while a program runs, as opposed to before.

    PipelineError
    +-- RunError          a rank that died or never answered, ranks that disagree, a stage that failed
        +-- InPlaceError  something saved for backward was changed before backward used it

Every message that a running rank raises names the rank, the position in its program and the action.
"""

from __future__ import annotations

from pipeline.errors import PipelineError


class RunError(PipelineError):
    """A program could not go on."""


class InPlaceError(RunError):
    """A saved tensor was changed in place between forward and backward; the gradient would be wrong."""
