"""From a plan to the program that runs it.

In:  a `Plan`.
Out: `compile_plan` gives a `Program` with communication, and `rank_devices` which devices each rank is.

A rank is one replica of a stage, or of the chunks that share a place in an interleaved pipeline; with tensor
parallelism it is several devices that act as one.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.actions import Kind
from pipeline.errors import PlanError
from pipeline.passes import add_communication, bpipe, recompute
from pipeline.plans import Plan, StageCost
from pipeline.program import Layout, Program, StageLayout, chain
from pipeline.schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    sequential,
    two_bw,
    zb_h1,
    zbv,
)
from pipeline.timeline import Durations

BATCHES = 4
"""Batches that a 2BW program runs before it drains: enough to see both versions of the weights in turn."""


def compile_plan(plan: Plan, *, batches: int = BATCHES) -> Program:
    """The program of a plan.

    Args:
        plan: The plan.
        batches: For 2BW, how many batches to run before the pipeline drains.

    Raises:
        PlanError: The schedule can't run these stages.
        ProgramError: As the schedule says.
    """
    program = _schedule(plan, batches)
    again = {s for s, stage in enumerate(plan.stages) if stage.recompute == "stage"}
    return add_communication(recompute(program, again))


def stage_costs(plan: Plan) -> tuple[StageCost, ...]:
    """The cost of each stage of a plan."""
    return tuple(stage.cost for stage in plan.stages)


def durations(plan: Plan) -> Durations | None:
    """How long the passes of each stage take; None where the plan doesn't say for all of them."""
    costs = stage_costs(plan)
    if not all(cost.forward_s and cost.backward_s for cost in costs):
        return None
    return lambda action: (
        costs[action.stage].forward_s if action.kind is Kind.FORWARD else costs[action.stage].backward_s
    )


def rank_devices(plan: Plan, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Devices of each rank; one device a rank, in order, for a plan that doesn't place its stages."""
    devices: dict[int, tuple[int, ...]] = {r: (r,) for r in range(layout.ranks)}
    for stage, place in zip(plan.stages, layout.stages, strict=True):
        devices |= dict(zip(place.ranks, stage.devices, strict=False))
    return tuple(devices[r] for r in range(layout.ranks))


def one_replica(plan: Plan) -> Plan | None:
    """One of the pipelines that a plan runs side by side, or None when its stages are replicated unequally.

    The pipelines only meet when they reduce gradients, so that one of them tells what all of them do.
    """
    counts = {stage.replicas for stage in plan.stages}
    sizes = {stage.micro_batch for stage in plan.stages}
    if len(counts) > 1 or len(sizes) > 1 or plan.micro_batches % plan.stages[0].replicas:
        return None
    stages = tuple(replace(stage, replicas=1, devices=stage.devices[:1]) for stage in plan.stages)
    return replace(plan, stages=stages, micro_batches=plan.micro_batches // plan.stages[0].replicas)


def _schedule(plan: Plan, batches: int) -> Program:
    p, v = len(plan.stages) // plan.virtual_stages, plan.virtual_stages
    replicas = plan.stages[0].replicas
    if plan.schedule in ("interleaved", "bpipe-interleaved"):
        _dealt_out(plan)
        program = interleaved(p, plan.micro_batches // replicas, v, replicas=replicas)
        return bpipe(program, durations=durations(plan)) if plan.schedule == "bpipe-interleaved" else program
    if plan.schedule == "zbv":
        _single(plan)
        return zbv(len(plan.stages) // 2, plan.micro_batches)
    if plan.schedule == "zb-h1":
        _single(plan)
        return zb_h1(len(plan.stages), plan.micro_batches)
    layout = _layout(plan, batches if plan.schedule == "2bw" else 1)
    if plan.schedule == "pipedream":
        return pipedream(layout, vertical_sync=plan.weight_mode == "vertical-sync")
    if plan.schedule == "2bw":
        return two_bw(layout, plan.micro_batches // replicas)
    if plan.schedule == "bpipe":
        return bpipe(one_f_one_b(layout), durations=durations(plan))
    return {"sequential": sequential, "gpipe": gpipe, "1f1b": one_f_one_b}[plan.schedule](layout)


def _layout(plan: Plan, batches: int) -> Layout:
    """Each stage on ranks of its own."""
    first = plan.stages[0]
    simple = chain(
        batches * plan.micro_batches,
        [stage.replicas for stage in plan.stages],
        sizes=[stage.micro_batch for stage in plan.stages],
    )
    samples = batches * plan.micro_batches * first.micro_batch
    stages = tuple(StageLayout(s.size, s.ranks, samples) for s in simple.stages)
    return Layout(stages, plan.edges, samples)


def _dealt_out(plan: Plan) -> None:
    if len(plan.stages) % plan.virtual_stages:
        raise PlanError(
            f"{len(plan.stages)} stages are no whole number of {plan.virtual_stages} chunks a device."
        )
    if len({(stage.replicas, stage.micro_batch) for stage in plan.stages}) > 1:
        raise PlanError(f"{plan.schedule} needs the same replicas and micro-batch size at every stage.")


def _single(plan: Plan) -> None:
    if any(stage.replicas > 1 for stage in plan.stages):
        raise PlanError(f"{plan.schedule} runs stages that are not replicated.")
