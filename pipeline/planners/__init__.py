"""Planners: a profiled graph and a topology in, a `Plan` out.

    pipedream   cuts and replicas by dynamic programming; no flush
    two_bw      parallel pipelines of equal stages, double-buffered weights
    ptdp        pipeline, tensor and data parallelism of a transformer

Each module has its own `Limits`; `plan` here takes any of them and calls the planner that they belong to.
"""

from pipeline.graph import ProfiledGraph
from pipeline.planners import pipedream, ptdp, two_bw
from pipeline.plans import Plan
from pipeline.topology import Topology

__all__ = ["pipedream", "plan", "ptdp", "two_bw"]


def plan(
    graph: ProfiledGraph, topology: Topology, limits: pipedream.Limits | two_bw.Limits | ptdp.Limits
) -> Plan:
    """The best plan of the planner whose limits these are.

    Raises:
        PlanError: There is none within the limits.
    """
    if isinstance(limits, two_bw.Limits):
        return two_bw.plan(graph, topology, limits)
    if isinstance(limits, ptdp.Limits):
        return ptdp.plan(graph, topology, limits)
    return pipedream.plan(graph, topology, limits)
