"""Simulate a plan: compile it, place it, and let one replica stand for all where they are alike."""

from __future__ import annotations

from pipeline.compile import BATCHES, compile_plan, one_replica, rank_devices, stage_costs
from pipeline.plans import Plan
from pipeline.simulator.engine import ring_seconds, simulate
from pipeline.simulator.result import Result
from pipeline.topology import Topology


def simulate_plan(
    plan: Plan,
    topology: Topology | None = None,
    *,
    collapse: bool = True,
    rendezvous: bool = True,
    batches: int = BATCHES,
) -> Result:
    """Simulate a plan.

    Args:
        plan: The plan.
        topology: The machines; None: transfers take no time.
        collapse: Simulate one of several pipelines that run side by side and only meet to reduce gradients.
            They don't contend for links then; leave it off where they share some.
        rendezvous: Whether a transfer starts only when both ends have been started.
        batches: For 2BW, how many batches to run.
    """
    single = one_replica(plan) if collapse else None
    chosen = plan if single is None else single
    program = compile_plan(chosen, batches=batches)
    return simulate(
        program,
        stage_costs(chosen),
        topology,
        devices=rank_devices(chosen, program.layout),
        rendezvous=rendezvous,
        update_s=None if single is None or topology is None else _reduce_seconds(plan, topology),
    )


def _reduce_seconds(plan: Plan, topology: Topology) -> tuple[float, ...]:
    """Seconds of adding up each stage's gradients over its replicas, which one replica alone does not do."""
    return tuple(
        ring_seconds(topology, [group[0] for group in stage.devices], stage.cost.parameter_bytes)
        if stage.devices
        else 0.0
        for stage in plan.stages
    )
