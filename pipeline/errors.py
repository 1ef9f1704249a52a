"""The errors that users of `pipeline` see.

    PipelineError
    +-- GraphError      a model graph or profile that cannot be what it says
    +-- TopologyError   a cluster description that cannot be what it says
    +-- PlanError       a plan that is malformed, or limits that no plan meets
    +-- ProgramError    a program or its text that cannot be read, or a schedule asked for what it cannot do
    +-- ValidationError a well-formed program that would go wrong when run

All of them derive from ValueError: the caller gave something that cannot be used.
"""

from __future__ import annotations


class PipelineError(ValueError):
    """What every error of this package derives from."""


class GraphError(PipelineError):
    """A model graph or profile is inconsistent: unknown node, cycle, negative cost, wrong file."""


class TopologyError(PipelineError):
    """A topology is inconsistent: no levels, non-positive bandwidth, a device that does not exist."""


class PlanError(PipelineError):
    """A plan is malformed, or no plan exists within the limits."""


class ProgramError(PipelineError):
    """A program, its text or the arguments of a schedule cannot be used."""


class ValidationError(PipelineError):
    """A program that reads well but would go wrong: each line names rank, index and reason."""
